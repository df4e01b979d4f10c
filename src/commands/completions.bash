
complete -r ddp_mp # the script above is generated for a program of this name

# In --model=m bash takes = for a word of its own, so that the word before the value is not the flag.
_ddp_mp_with_values() {
    local previous="$3"
    [[ "$previous" != = ]] || previous="${COMP_WORDS[COMP_CWORD - 2]}"
    _ddp_mp "$1" "$2" "$previous"
}

if [[ "${BASH_VERSINFO[0]}" -eq 4 && "${BASH_VERSINFO[1]}" -ge 4 || "${BASH_VERSINFO[0]}" -gt 4 ]]; then
    complete -F _ddp_mp_with_values -o nosort -o bashdefault -o default ddp-mp
else
    complete -F _ddp_mp_with_values -o bashdefault -o default ddp-mp
fi
