"""Two ranks that share the GPU, with the real NCCL: the only collectives that one GPU can show, since NCCL launches nothing
for one rank. They take turns on the GPU, so no time of them says anything about speed."""

import lzma
import sys

from machine import HERE, SAME_BITS, CommandFailed, check_near, end_on_gpu, json_lines
from ports import free_port
from results import LeftOut

# How two ranks may reach each other on one GPU: the first that works is used from then on.
TRANSPORTS = [{}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}]
MLP = ["--max-epochs=2", "--model=mlp"]
OPTIONS = [
    [],
    ["--bucket-cap-mb=0.001", "--momentum=0.9"],
    ["--zero", "--optimizer=adamw"],
    ["--find-unused-parameters", "--check-collectives"],
    ["--exact-mean"],
    ["--amp=fp16"],
]


def warnings_of_nccl(machine):
    """The variables with which NCCL writes them into files, which `machine.show` prints."""
    return {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": str(machine.scratch / "nccl-%p.log")}


class SharedGpu:
    """How two ranks share the GPU of a machine with an NCCL from 2.30.3 on."""

    def __init__(self, machine):
        self.machine, self.works, self.transport = machine, None, {}
        self.newer = machine.scratch / "libnccl.so.2"

    def variables(self):
        """Returns the variables with which NCCL lets two ranks have one GPU. Raises LeftOut if none is there that can."""
        more = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **warnings_of_nccl(self.machine), **self.transport}
        if self.machine.simulated:
            return {**more, "SIM_NCCL_VERSION": "23007"}
        # Preloaded, because libtorch_cuda finds its own NCCL by an RPATH, which comes before LD_LIBRARY_PATH.
        self.unpack()
        return {**more, "LD_PRELOAD": str(self.newer)}

    def unpack(self):
        """Unpacks the newer NCCL."""
        packed = HERE / "libnccl.so.2.xz"
        if not packed.exists():
            raise LeftOut("no NCCL of 2.30.3 or later: libnccl.so.2.xz is not here")
        if not self.newer.exists():
            self.newer.write_bytes(lzma.decompress(packed.read_bytes()))

    def checked_variables(self):
        """As `variables`, once two ranks are not known to fail."""
        if self.works is False:
            raise LeftOut("NCCL does not let two ranks share this GPU: see above")
        return self.variables()


def shared_gpu(machine):
    """Returns what is known about how two ranks share the GPU of `machine`."""
    if not hasattr(machine, "shared_gpu"):
        machine.shared_gpu = SharedGpu(machine)
    return machine.shared_gpu


def as_torchrun(rank, port):
    """The variables that torchrun gives a process, of two."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 4}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()}


def two_processes(machine, command, limit, of_rank=lambda rank: {}, **more):
    """Runs two processes of one rank each, and returns how they have ended. `of_rank` gives a rank variables of its own."""
    port = free_port()
    commands = [(command, as_torchrun(rank, port) | of_rank(rank)) for rank in range(2)]
    return machine.together(commands, limit, **more)


def must_succeed(machine, all_ended):
    """Raises for the first process that has failed."""
    for rank, ended in enumerate(all_ended):
        if ended.status != 0:
            machine.show(all_ended)
            raise CommandFailed(f"rank {rank}", ended)
    return all_ended


def train(machine, flags, of_rank=lambda rank: {}, **more):
    """Trains with two processes, and returns the last event."""
    command = [machine.program, "--log-format=json", "--nproc-per-node=1", "--backend=nccl", *flags]
    first, _ = must_succeed(machine, two_processes(machine, command, 40, of_rank, **more))
    return end_on_gpu(json_lines(first.stdout))


def compare_with_cpu(machine, findings, flags, end, **more):
    """Adds a row with the losses of both, and whether the ranks have the same parameters."""
    there = machine.on_cpu(["--nproc-per-node=2", *flags])["loss"]
    row = {**more, "options": " ".join(flags), "loss": end["loss"], "CPU": there, "replicas equal": end["replicas_equal"]}
    findings.row(row)
    check_near(end["loss"], there, 3e-2 if "--amp=fp16" in flags else 1e-3)
    if not end["replicas_equal"]:
        raise RuntimeError("the ranks have different parameters")


def losses_of_two_processes(machine, findings):
    shared = shared_gpu(machine)
    shared.variables()  # ends this part if there is no NCCL that can

    def losses(flags):
        compare_with_cpu(machine, findings, flags, train(machine, flags, **shared.variables()))
        return True

    shared.works = False
    for shared.transport in TRANSPORTS:
        if findings.attempt(f"plain, {shared.transport}", lambda: losses(MLP)):
            shared.works = True
            break
    if shared.works:
        findings.fact("transport", shared.transport or "NCCL's own choice")
        [report] = json_lines(machine.run([machine.program, "env", "--log-format=json"], **shared.variables()))
        findings.fact("NCCL", report["nccl"])
        for flags in machine.some(OPTIONS[1:], 1):
            findings.attempt(" ".join(flags), lambda: losses([*MLP, *flags]))


def two_threads(machine, findings):
    """Two threads of one process: how the program runs on machines with several GPUs. With two ranks the order of additions
    cannot matter, so the bits are those of the threaded backend."""
    more = shared_gpu(machine).checked_variables()
    flags = [*MLP, "--nproc-per-node=2"]
    hashes = []
    for backend, variables in [("nccl", more), ("threaded", {})]:
        end = machine.on_gpu([*flags, f"--backend={backend}"], **SAME_BITS, **variables)
        compare_with_cpu(machine, findings, MLP, end, backend=backend)
        hashes.append(end["parameters_hash"])
    findings.fact("parameters", hashes)
    if hashes[0] != hashes[1]:
        raise RuntimeError("the two backends have other parameters")


def torch_nccl(machine, findings):
    """Two processes with the NCCL of this torch. It refuses ranks of one host that share a GPU, and takes two host ids for
    two hosts, which only sockets connect."""
    more = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **warnings_of_nccl(machine)}
    end = train(machine, MLP, lambda rank: {"NCCL_HOSTID": f"r{rank}"}, **more)
    compare_with_cpu(machine, findings, MLP, end)


def torchrun(machine, findings):
    """The two processes again, started by torchrun, which also has to end what it has started."""
    more = shared_gpu(machine).checked_variables()
    # --standalone would look up the machine's name, which may lead nowhere.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", "--no-python", machine.program, "--log-format=json", "--backend=nccl", *MLP]
    compare_with_cpu(machine, findings, MLP, end_on_gpu(json_lines(machine.run(command, **more))))


# Every collective, dtype and reduction; tests/gpus/collectives.rs plays them on simulated GPUs.
SCENES = ["kinds", "functional", "waits", "asynchronous", "surface"]


def collectives(machine, findings):
    more = shared_gpu(machine).checked_variables()
    command = [machine.scratch / "tests-gpus", "collectives::child", "--exact", "--nocapture"]

    def play(scene):
        port, folder = free_port(), machine.scratch / f"scene-{scene}"
        folder.mkdir()

        def part_of(rank):
            return {"DDP_MP_SCENE": f"{scene} {rank} 2 1 127.0.0.1 {port}", "DDP_MP_FOLDER": str(folder)}

        ended = machine.together([(command, part_of(rank)) for rank in range(2)], **more)
        must_succeed(machine, ended)
        if not all("scene over" in it.stdout for it in ended):
            machine.show(ended)
            raise RuntimeError("a rank did not come to the end")
        findings.fact(scene, "passed")

    for scene in machine.some(SCENES, 2):
        findings.attempt(scene, lambda: play(scene))


# How rank 1 fails, and --timeout: a rank that stalls, or that is killed, is only noticed by the time that passes.
FAULTS = {"kill": "8s", "error": "1h", "stall": "8s", "panic": "1h"}


def failures(machine, findings):
    """Rank 1 fails in step 5: rank 0 must name it, and end, however NCCL's kernel waits."""
    more = shared_gpu(machine).checked_variables()

    def fail(kind, timeout):
        command = [machine.program, "--nproc-per-node=1", "--backend=nccl", "--model=mlp", "--max-epochs=50"]
        command += ["--grace-period=5s", f"--timeout={timeout}", f"--inject-fault={kind}:rank=1,at=step,step=5"]
        ended = two_processes(machine, command, 45, **more)
        lines = ended[0].stderr.splitlines()
        named = next((line for line in lines if "failed in" in line or "timed out" in line), "")
        statuses = ", ".join(str(it.status) for it in ended)
        findings.row({"rank 1": kind, "exit statuses": statuses, "rank 0 says": named[:160]})
        if ended[0].status != 1 or ended[1].status is None or "rank 1" not in ended[0].stderr:
            machine.show(ended)
            raise RuntimeError(f"exit statuses {statuses}; rank 0 should end with 1 and name rank 1")

    for kind, timeout in machine.some(list(FAULTS.items()), 2):
        findings.attempt(kind, lambda: fail(kind, timeout))
