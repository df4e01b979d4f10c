"""Hosts, as network namespaces: who listens where, what they come to, processes of a host that share its memory, a host
that is lost, and a cable that is cut."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from runs import ENDLESS, FLAGS, Run, check, passed, result_of, same, threads


class Hosts:
    """Three hosts: namespaces with a network, an address and a name of their own, and a switch between them."""

    def __init__(self):
        self.names = [f"ddp-mp-{os.getpid()}-{host}" for host in "abc"]
        self.switch = f"ddp-mp-{os.getpid()}-switch"
        self.addresses = [f"10.213.77.{host}" for host in [1, 2, 3]]
        self.made = []

    def why_not(self):
        """Makes them, or says why that cannot be."""
        if os.geteuid() != 0:
            return "it takes root"
        for tool, package in [("ip", "iproute2"), ("ss", "iproute2"), ("unshare", "util-linux")]:
            if not shutil.which(tool):
                return f"there is no {tool} ({package} in Debian)"
        for name in [self.switch, *self.names]:
            if why_not := self.tool("ip", "netns", "add", name):
                return why_not
            self.made.append(name)
        steps = [(self.switch, "link add bridge0 type bridge"), (self.switch, "link set bridge0 up")]
        for port, (name, address) in enumerate(zip(self.names, self.addresses)):
            steps += [
                (name, "link set lo up"),
                (name, f"link add veth0 type veth peer name port{port} netns {self.switch}"),
                (name, f"addr add {address}/24 dev veth0"),
                (name, "link set veth0 up"),
                (self.switch, f"link set port{port} master bridge0"),
                (self.switch, f"link set port{port} up"),
            ]
        for name, words in steps:
            if why_not := self.tool("ip", "-n", name, *words.split()):
                return why_not
        return None

    def tool(self, *command):
        """What it complains of, if it fails."""
        done = subprocess.run(command, capture_output=True, text=True)
        return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else None

    def start(self, program, flags, counts=(1, 1)):
        """By hand, with the command `program`: as many ranks on each host as `counts` says."""
        command = [*program, f"--nnodes={len(counts)}", f"--master-addr={self.addresses[0]}", *flags]
        own = [[f"--node-rank={host}", f"--nproc-per-node={ranks}"] for host, ranks in enumerate(counts)]
        return [self.run(host, [*command, *own[host]]) for host in range(len(counts))]

    def start_processes(self, program, flags, counts):
        """As torchrun does: as many processes of one rank on each host as `counts` says."""
        runs = []
        for host, count in enumerate(counts):
            for local in range(count):
                place = {"RANK": len(runs), "WORLD_SIZE": sum(counts), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
                store = {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": 29500}
                group = {"GROUP_RANK": host, "GROUP_WORLD_SIZE": len(counts)}
                variables = [f"{name}={value}" for name, value in {**place, **group, **store}.items()]
                runs.append(self.run(host, ["env", *variables, *program, *flags]))
        return runs

    def play(self, tests, folder, scene, counts):
        """The scene of tests/processes.rs, with as many processes on each host as `counts` says, which share a folder."""
        program, package = tests
        child = [program, "processes::child", "--exact", "--nocapture"]
        runs = []
        for host, count in enumerate(counts):
            for _ in range(count):
                part = f"{scene} {len(runs)} {sum(counts)} 1 {self.addresses[0]} 29500"
                variables = [f"DDP_MP_SCENE={part}", f"DDP_MP_FOLDER={folder}"]
                runs.append(self.run(host, ["env", "-C", package, *variables, *child]))
        return runs

    def run(self, host, command):
        named = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', f"host-{'abc'[host]}"]
        inside = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", *named]
        return Run([*inside, *command], one_core=True)

    def listening(self, name):
        """The addresses where somebody listens, with ports."""
        sockets = subprocess.check_output(["ip", "netns", "exec", name, "ss", "-Hltn"], text=True)
        return [line.split()[3] for line in sockets.splitlines()]

    def nobody_is_left(self, what):
        for name in self.names:
            check(not self.listening(name), f"{what}: {name} listens at {self.listening(name)}")

    def cable(self, state):
        why_not = self.tool("ip", "-n", self.names[0], "link", "set", "veth0", state)
        check(not why_not, why_not)

    def remove(self):
        for name in self.made:
            if complaint := self.tool("ip", "netns", "del", name):
                print(f"launchers: {complaint}", file=sys.stderr)


def several_hosts(program, tests):
    """Of ranks on CPUs, and of the integration tests: their program, and the folder that it runs in."""
    hosts = Hosts()
    try:
        if why_not := hosts.why_not():
            return print(f"launchers: skipped: hosts as network namespaces: {why_not}")
        by_hand(program, hosts, "two hosts")
        one_answer(program, hosts)
        lost(program, hosts)
        shared_memory(program, hosts, tests)
        who_listens(program, hosts)
        cut(program, hosts)
        slow = ["tc", "-n", hosts.names[0], "qdisc", "add", "dev", "veth0", "root", "netem"]
        no_tc = "there is no tc (iproute2 in Debian)"
        why_not = hosts.tool(*slow, "delay", "10ms") if shutil.which("tc") else no_tc
        if why_not:
            return print(f"launchers: skipped: two hosts with 10 ms between them: {why_not}")
        by_hand(program, hosts, "two hosts with 10 ms between them")
    finally:
        hosts.remove()


def by_hand(program, hosts, what):
    for ranks in [1, 2]:
        runs = hosts.start([program], FLAGS, (ranks, ranks))
        result = result_of(runs)
        [start] = runs[0].events("start")
        check(start["nnodes"] == 2 and start["world_size"] == 2 * ranks, f"it began as {start}")
        same(result, threads(program, 2 * ranks), f"{what}, {ranks} of the ranks on each")
    hosts.nobody_is_left(what)


def one_answer(program, hosts):
    """Four ranks have the bits of threads, wherever they are."""
    convolutions = ["--model=cnn", "--in-features=64", "--sync-batch-norm"]
    options = {
        "--zero": [*FLAGS, "--zero"],
        "--share-model": [*FLAGS, "--share-model", "--max-grad-norm=0.1"],
        "--sync-batch-norm": [*convolutions, "--max-epochs=2", "--log-format=json"],
    }
    for name, flags in options.items():
        expected = threads(program, 4, flags)
        for counts in [(2, 2), (3, 1), (1, 1, 2)]:
            found = result_of(hosts.start([program], flags, counts))
            same(found, expected, f"hosts of {' and '.join(map(str, counts))} ranks, {name}")
    hosts.nobody_is_left("three hosts")


def lost(program, hosts):
    """One of three hosts is lost. Another saves the last whole step, from which four threads go on to the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        saving = f"--checkpoint-dir={folder}/run"
        runs = hosts.start([program], [*ENDLESS, saving, "--save-every-epochs=1000"], (1, 1, 2))
        runs[0].until('"epoch":0')
        runs[1].process.kill()
        for host, run in enumerate(runs):
            run.end(None if host == 1 else 1)
        text = "".join(run.text() for run in runs)
        saved = re.findall(r"has saved the state after (\d+) steps", text)
        check(saved, f"nobody saved the last step: {text}")
        step = max(map(int, saved))
        flags = [*ENDLESS, f"--max-steps={step + 9}"]
        found = threads(program, 4, [*flags, saving, "--resume=auto"])
        same(found, threads(program, 4, flags), f"three hosts, one is lost, and four threads go on from step {step}")
    hosts.nobody_is_left("a lost host")


def shared_memory(program, hosts, tests):
    """Several processes on each host share its memory, and the network carries each sum once for each host."""
    for counts in [(2, 2), (3, 3), (3, 1), (1, 2)]:
        what = f"{counts[0]} and {counts[1]} processes on two hosts"
        for more in [[], ["--zero"]]:
            flags = [*FLAGS, "--shared-memory=require", *more]
            found = result_of(hosts.start_processes([program], flags, counts))
            expected = threads(program, sum(counts), [*FLAGS, *more])
            same(found, expected, " ".join([what, *more]))
            if counts[0] == counts[1] and not more:
                expected = result_of(hosts.start([program], FLAGS, counts))
                same(found, expected, what)
                sent = [sum(it["bytes_sent_by_rank"]) for it in [found, expected]]
                check(sent[0] == sent[1] > 0, f"{what}: {sent[0]} bytes are sent, and {sent[1]} by threads")
    scenes = [(scene, (2, 2)) for scene in ["collectives", "groups", "surface"]]
    scenes += [("collectives", (1, 3)), ("functional", (2, 1)), ("mismatch", (2, 1))]
    for scene, counts in scenes:
        with tempfile.TemporaryDirectory() as folder:
            for run in hosts.play(tests, folder, scene, counts):
                if scene == "mismatch":
                    text = run.end(101).text()
                    called = "rank 0 called all_reduce(sum) of float32 [100000] at tests/processes.rs:"
                    odd = "rank 2 called all_reduce(sum) of float32 [100001] at tests/processes.rs:"
                    check(called in text and odd in text, f"the calls are not named: {run.output()}")
                else:
                    check("scene over" in run.end().text(), run.output())
        passed(f"{counts[0]} and {counts[1]} processes on two hosts: {scene}")
    for victim in range(4):
        runs = hosts.start_processes([program], ENDLESS, (2, 2))
        runs[0].until('"epoch":0')
        runs[victim].process.kill()
        for rank, run in enumerate(runs):
            text = run.end(None if rank == victim else 1).text()
            named = f"rank {victim} (CPU:{victim % 2} on host-{'ab'[victim // 2]}, process " in text
            check(rank == victim or named, f"rank {victim} is not named: {run.output()}")
        hosts.nobody_is_left("a killed process")
    passed("2 and 2 processes on two hosts, and one is killed: all end, and name its rank")
    for asked in range(4):
        runs = hosts.start_processes([program], ENDLESS, (2, 2))
        runs[0].until('"epoch":0')
        runs[asked].process.terminate()
        for run in runs:
            run.end(128 + signal.SIGTERM)
    passed("2 and 2 processes on two hosts, and one is asked to stop: all do, after the same step")


def who_listens(program, hosts):
    """Where they are asked to, and nowhere else; it ends with them."""
    runs = hosts.start([program], ENDLESS)
    runs[0].until('"epoch":0')
    for name, address in zip(hosts.names, hosts.addresses):
        listening = hosts.listening(name)
        elsewhere = [it for it in listening if it.rpartition(":")[0] != address]
        check(not elsewhere, f"{name} listens at {elsewhere}, which is not {address}")
        store = f"{hosts.addresses[0]}:29500"
        serves = address == hosts.addresses[0]
        check((store in listening) == serves, f"{name} listens at {listening}")
    # Either is told, and both stop.
    runs[1].process.terminate()
    for run in runs:
        run.end(128 + signal.SIGTERM)
    hosts.nobody_is_left("two hosts")
    passed("two hosts listen at their own addresses only, and not after the end")


def cut(program, hosts):
    """The cable is cut in the middle: both notice, name the other, and save where they have come to."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*ENDLESS, "--timeout=4s", "--grace-period=4s", f"--checkpoint-dir={folder}/run"]
        flags.append("--save-every-epochs=1000")  # so that they have not saved it already
        runs = hosts.start([program], flags)
        runs[0].until('"epoch":0')
        hosts.cable("down")
        for run, other, host in zip(runs, [1, 0], "ba"):
            text = run.end(1).text()
            named = f"rank {other} (CPU:0 on host-{host}, process " in text
            check(named, f"rank {other} on host-{host} is not named: {run.output()}")
        text = "".join(run.text() for run in runs)
        check(" has saved the state after " in text, f"nobody saved the last step: {text}")
    hosts.cable("up")
    hosts.nobody_is_left("a cut cable")
    passed("two hosts, and the cable is cut: both end, name the other's rank, and save the last step")
