"""Two hosts, as network namespaces: who listens where, what they come to, and a cable that is cut."""

import os
import shutil
import signal
import subprocess
import sys

from runs import ENDLESS, FLAGS, Run, check, near, passed, same, threads


class Hosts:
    """Two hosts: namespaces with a network, an address and a name of their own, and a cable between them."""

    def __init__(self):
        self.names = [f"ddp-mp-{os.getpid()}-{host}" for host in "ab"]
        self.addresses = ["10.213.77.1", "10.213.77.2"]
        self.made = []

    def why_not(self):
        """Makes them, or says why that cannot be."""
        if os.geteuid() != 0:
            return "it takes root"
        for tool, package in [("ip", "iproute2"), ("ss", "iproute2"), ("unshare", "util-linux")]:
            if not shutil.which(tool):
                return f"there is no {tool} ({package} in Debian)"
        for name in self.names:
            if why_not := self.tool("ip", "netns", "add", name):
                return why_not
            self.made.append(name)
        a, b = self.names
        link = ["ip", "link", "add", "veth0", "netns", a, "type", "veth"]
        if why_not := self.tool(*link, "peer", "name", "veth0", "netns", b):
            return why_not
        for name, address in zip(self.names, self.addresses):
            for words in ["link set lo up", f"addr add {address}/24 dev veth0", "link set veth0 up"]:
                if why_not := self.tool("ip", "-n", name, *words.split()):
                    return why_not
        return None

    def tool(self, *command):
        """What it complains of, if it fails."""
        done = subprocess.run(command, capture_output=True, text=True)
        return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else None

    def start(self, program, flags, ranks=1):
        """By hand, on both, with the command `program`."""
        named = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"']
        flags = [f"--master-addr={self.addresses[0]}", f"--nproc-per-node={ranks}", *flags]
        runs = []
        for node, (name, host) in enumerate(zip(self.names, "ab")):
            command = ["ip", "netns", "exec", name, "unshare", "--uts", *named, f"host-{host}"]
            command += [*program, "--nnodes=2", f"--node-rank={node}", *flags]
            runs.append(Run(command, one_core=True))
        return runs

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


def two_hosts(program, on_gpus):
    """Of ranks on CPUs, and of the command `on_gpus`, which simulates a GPU for each."""
    hosts = Hosts()
    try:
        if why_not := hosts.why_not():
            return print(f"launchers: skipped: two hosts as network namespaces: {why_not}")
        by_hand(program, hosts, "two hosts")
        by_hand(program, hosts, "two hosts with simulated GPUs", on_gpus)
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


def by_hand(program, hosts, what, command=None):
    for ranks, compare in [(1, same), (2, near)]:
        first, second = hosts.start(command or [program], FLAGS, ranks)
        result = first.result()
        second.end()
        [start] = first.events("start")
        check(start["nnodes"] == 2 and start["world_size"] == 2 * ranks, f"it began as {start}")
        compare(result, threads(program, 2 * ranks), f"{what}, {ranks} of the ranks on each")
    hosts.nobody_is_left(what)


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
    """The cable is cut in the middle: both notice, and name the other."""
    runs = hosts.start([program], [*ENDLESS, "--timeout=4s", "--grace-period=4s"])
    runs[0].until('"epoch":0')
    hosts.cable("down")
    for run, other, host in zip(runs, [1, 0], "ba"):
        text = run.end(1).text()
        named = f"rank {other} (CPU:0 on host-{host}, process " in text
        check(named, f"rank {other} on host-{host} is not named: {run.output()}")
    hosts.cable("up")
    hosts.nobody_is_left("a cut cable")
    passed("two hosts, and the cable is cut: both end, and name the other's rank")
