"""Measures steps of two "hosts" on one machine, and what `bench step --simulate-cluster` makes of the same numbers.

simulated_cluster.py PROGRAM [ROUNDS]

The hosts are network namespaces with a cable of 1 Gbit/s between them, and then one that takes 10 ms each way besides,
which makes it root's work; before them two processes talk over the loopback. All share the cores of this machine.
Figures and no verdict: they depend on what else the machine does.
"""

import collections
import fcntl
import json
import os
import pathlib
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests/launchers"))
from hosts import Hosts  # noqa: E402
from ports import free_port  # noqa: E402

FLAGS = ["--model=mlp", "--hidden=1024,1024,1024", "--log-format=json"]
STEPS = 20
RATE = "1gbit"
DELAY = 0.010
# No command here runs for so long, unless it hangs.
LIMIT = 300
PORT = 29600
MESSAGE, STREAM = 256, 64 << 20


def fail(what):
    sys.exit(f"simulated_cluster.py: {what}")


def read_exactly(connection, count):
    while count:
        count -= len(connection.recv(min(count, 1 << 20))) or fail("the other end is gone")


def answer(address):
    """The other end of `ask`."""
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for count in [MESSAGE] * 60 + [STREAM] * 2:
            read_exactly(connection, count)
            connection.sendall(bytes(MESSAGE))
        connection.recv(1)


def ask(address):
    """How long a small message takes there, and how many bytes a second arrive."""
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def there_and_back(message):
            began = time.perf_counter()
            connection.sendall(message)
            read_exactly(connection, MESSAGE)
            return time.perf_counter() - began

        trips = [there_and_back(bytes(MESSAGE)) for _ in range(60)]
        round_trip = statistics.median(trips[10:])
        there_and_back(bytes(STREAM))  # by which TCP's window has opened
        elapsed = there_and_back(bytes(STREAM))
    print(json.dumps([round_trip / 2, STREAM / (elapsed - round_trip)]))


class Delay:
    """A cable between two hosts that holds every packet back for a while."""

    def __init__(self, hosts, delay):
        self.delay = delay
        self.addresses = ["10.213.78.1", "10.213.78.2"]
        self.files = []
        for side, (name, address) in enumerate(zip(hosts.names, self.addresses)):
            device = f"delay{side}"
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self.files.append(file)
            set_interface, tun, no_header = 0x400454CA, 0x0001, 0x1000
            fcntl.ioctl(file, set_interface, struct.pack("16sH22x", device.encode(), tun | no_header))
            ip = ["ip", "-n", name]
            for command in [
                ["ip", "link", "set", device, "netns", name],
                [*ip, "link", "set", device, "mtu", "65520"],
                [*ip, "addr", "add", f"{address}/24", "dev", device],
                [*ip, "link", "set", device, "up"],
            ]:
                if why_not := hosts.tool(*command):
                    fail(why_not)
        threading.Thread(target=self.carry, daemon=True).start()

    def carry(self):
        # The network does not wait for a core.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -15)
        on_the_way = {file: collections.deque() for file in self.files}
        while True:
            due = [packets[0][0] for packets in on_the_way.values() if packets]
            rest = max(0, min(due) - time.perf_counter()) if due else None
            readable, _, _ = select.select(self.files, [], [], rest)
            for file in readable:
                try:
                    while True:
                        packet = os.read(file, 1 << 16)
                        on_the_way[file].append((time.perf_counter() + self.delay, packet))
                except BlockingIOError:
                    pass
                except OSError:
                    return  # its host is gone
            for file, other in [self.files, self.files[::-1]]:
                packets = on_the_way[file]
                while packets and packets[0][0] <= time.perf_counter():
                    os.write(other, packets.popleft()[1])


class Place:
    """Two hosts, or two processes' places on one."""

    def __init__(self, title, addresses, names=None):
        self.title = title
        self.addresses = addresses
        self.enter = [["ip", "netns", "exec", name] for name in names] if names else [[], []]

    def link(self):
        """Latency and bandwidth between them."""
        script, there = [sys.executable, __file__], self.addresses[0]
        answering = subprocess.Popen(
            [*self.enter[0], *script, "--answer", there], stdout=subprocess.PIPE, text=True
        )
        answering.stdout.readline()
        asking = subprocess.check_output(
            [*self.enter[1], *script, "--ask", there], text=True, timeout=LIMIT
        )
        answering.wait(LIMIT)
        return json.loads(asking)

    def run(self, commands):
        """Runs commands at the same time, the first half of them here and the others there, with a core for each
        half. Returns the first one's objects."""
        runs = []
        for index, command in enumerate(commands):
            side = index * 2 // len(commands)
            core = {sorted(os.sched_getaffinity(0))[side]}
            runs.append(
                subprocess.Popen(
                    [*self.enter[side], *command],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    preexec_fn=lambda core=core: os.sched_setaffinity(0, core),
                )
            )
        ended = [run.communicate(timeout=LIMIT) for run in runs]
        if any(run.returncode for run in runs):
            fail("\n".join(stderr for _, stderr in ended))
        return [json.loads(line) for line in ended[0][0].splitlines()]

    def step(self, program, processes, ranks, flags):
        """The median step of all processes together, in microseconds."""
        start = [program, "bench", "step", *FLAGS, *flags, f"--nproc-per-node={ranks}"]
        start += [f"--steps={STEPS}", f"--nnodes={processes}"]
        start += [f"--master-addr={self.addresses[0]}", f"--master-port={free_port()}"]
        nodes = self.run([[*start, f"--node-rank={index}"] for index in range(processes)])
        return nodes[0]["us_per_step"]

    def modelled(self, program, ranks, flags, link):
        """What the model makes of it, from the steps of a process in each place that knows nothing of the other."""
        cluster = f"nodes=2,gpus={ranks},algorithm=hierarchical,{link}"
        command = [program, "bench", "step", *FLAGS, *flags, f"--nproc-per-node={ranks}"]
        command += [f"--steps={STEPS}", f"--simulate-cluster={cluster}"]
        return self.run([command, command])[-1]["us_per_step"]


def within(program):
    """Latency and bandwidth of a rank in shared memory, as nccl-tests count."""
    command = [program, "bench", "all-reduce", "--nproc-per-node=2", "--log-format=json"]
    sizes = ["--min-bytes=4", "--max-bytes=8M", f"--step-factor={2 << 20}"]
    rows = subprocess.check_output([*command, *sizes], stderr=subprocess.DEVNULL, text=True)
    small, large = map(json.loads, rows.splitlines())
    return f"node-latency={small['time_us'] / 2:.2f}us,node-bandwidth={large['busbw']:.2f}GB/s"


# Processes, ranks in each, and flags. With the larger batch backward is long enough to hide something.
WAYS = {
    "2 x 1, batch 32": (2, 1, []),
    "2 x 1, --no-overlap": (2, 1, ["--no-overlap"]),
    "2 x 1, batch 256": (2, 1, ["--batch-size=256"]),
    "2 x 1, 256, --no-overlap": (2, 1, ["--batch-size=256", "--no-overlap"]),
    "2 x 2, batch 32": (2, 2, []),
    "4 x 1, batch 32": (4, 1, []),
}


def compare(program, rounds, place, memory):
    latency, bandwidth = place.link()
    def link_with(latency):
        return f"latency={latency * 1e6:.0f}us,bandwidth={bandwidth / 1e6:.1f}MB/s"

    link = link_with(latency)
    # Gloo sends a header first, and nothing before the receiver has asked for it: three messages for one of the model.
    modelled_link = link_with(3 * latency)
    print(f"\n{place.title}: {link}\n  within a process: {memory}")
    print(f"  {'processes x ranks':26}{'measured':>12}{'modelled':>12}{'ratio':>8}", flush=True)
    measured = collections.defaultdict(list)
    model = collections.defaultdict(list)
    for _ in range(rounds):
        for name, (processes, ranks, flags) in WAYS.items():
            measured[name].append(place.step(program, processes, ranks, flags))
            if processes == 2:
                of_two = place.modelled(program, ranks, flags, f"{modelled_link},{memory}")
                model[name].append(of_two)
    medians = {name: statistics.median(times) for name, times in measured.items()}
    for name, time_us in medians.items():
        line = f"  {name:26}{time_us / 1e3:9.1f} ms"
        if name in model:
            by_model = statistics.median(model[name])
            line += f"{by_model / 1e3:9.1f} ms{by_model / time_us:8.2f}"
        print(line)
    small, small_without, large, large_without, hierarchical, each = medians.values()
    without = f"{small_without / small:.2f} times as long, with batch 256 {large_without / large:.2f}"
    print(f"  a step without overlap takes {without}")
    print(f"  4 processes that each send take {each / hierarchical:.2f} times as long as 2 x 2 ranks")
    sys.stdout.flush()


def main(program, rounds):
    program = pathlib.Path(program).resolve()
    if not program.is_file():
        fail(f"{program} is no program")
    if len(os.sched_getaffinity(0)) < 2:
        fail("it takes two cores")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    memory = within(program)
    compare(program, rounds, Place("the loopback", ["127.0.0.1"] * 2), memory)
    hosts = Hosts()
    try:
        if why_not := hosts.why_not():
            return print(f"skipped: two hosts as network namespaces: {why_not}")

        def limit(device):
            for name in hosts.names:
                add = ["tc", "-n", name, "qdisc", "add", "dev", device(name), "root", "tbf"]
                if why_not := hosts.tool(*add, "rate", RATE, "burst", "128kb", "limit", "32mb"):
                    return fail(why_not)

        limit(lambda name: "veth0")
        compare(program, rounds, Place("1 Gbit/s", hosts.addresses, hosts.names), memory)
        delay = Delay(hosts, DELAY)
        limit(lambda name: f"delay{hosts.names.index(name)}")
        place = Place("1 Gbit/s, and 10 ms each way", delay.addresses, hosts.names)
        compare(program, rounds, place, memory)
    finally:
        hosts.remove()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ["--answer", "--ask"]:
        {"--answer": answer, "--ask": ask}[sys.argv[1]](sys.argv[2])
    elif len(sys.argv) in [2, 3]:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 3)
    else:
        fail("give it the program, and in how many rounds to measure")
