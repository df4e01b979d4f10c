
# fish would read a flag such as n-layer as -n, --layer. So each gets a letter of its own, which completes nothing.
functions --erase __fish_ddp_mp_optspecs
functions --copy __fish_ddp_mp_global_optspecs __fish_ddp_mp_optspecs
function __fish_ddp_mp_global_optspecs
    set -l letter 0
    for optspec in (__fish_ddp_mp_optspecs)
        if string match --quiet --regex '^.-' -- $optspec
            echo $letter-$optspec
            set letter (math $letter + 1)
        else
            echo $optspec
        end
    end
end
