//! The variables of each launcher, as it sets them.

mod wrong;

use std::collections::HashMap;
use std::path::Path;

use super::*;
use crate::launch::NodeSlice;

/// The second of two workers of `torchrun --no-python --nproc-per-node=2`. (torch 2.11)
const TORCHRUN: &str = "GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 \
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 OMP_NUM_THREADS=1 RANK=1 ROLE_NAME=default ROLE_RANK=1 \
    ROLE_WORLD_SIZE=2 TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_o__zuay2/none_8_gdohn2/attempt_0/1/error.json \
    TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=none \
    TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT TORCHELASTIC_USE_AGENT_STORE=True \
    TORCH_NCCL_ASYNC_ERROR_HANDLING=1 WORLD_SIZE=2";

/// The second of two workers with `--virtual-local-rank --rdzv-backend=c10d --rdzv-id=job7 --max-restarts=3` and
/// `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. It has `LOCAL_RANK=0`, like the first.
const VIRTUAL: &str = "CUDA_VISIBLE_DEVICES=1 GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=0 \
    LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=34803 OMP_NUM_THREADS=1 RANK=1 WORLD_SIZE=2 \
    TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=job7 \
    TORCHELASTIC_USE_AGENT_STORE=False";

/// One worker on each of two machines.
const ALONE: &str = "GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=node1 \
    MASTER_PORT=29500 RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True";

/// The sixth task of `srun` with eight tasks on four nodes.
const SRUN: &str = "SLURM_JOB_ID=4103 SLURM_JOB_NAME=train SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID=5 \
    SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_NNODES=4 SLURM_STEP_NUM_TASKS=8 \
    SLURM_STEP_NUM_NODES=4 SLURM_STEP_TASKS_PER_NODE=2(x4) SLURM_TASKS_PER_NODE=2(x4) \
    SLURM_JOB_NODELIST=node[03-05,07] SLURM_STEP_NODELIST=node[03-05,07] SLURM_CPUS_PER_TASK=6";

/// The second task of `srun --nodes=2 --ntasks-per-node=1`.
const SRUN_NODES: &str = "SLURM_JOB_ID=90012 SLURM_STEP_ID=3 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 \
    SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) \
    SLURM_STEP_NODELIST=a[1-2]b[3] SLURM_JOB_NODELIST=a[1-2]b[3]";

/// A batch script, before srun.
const SBATCH: &str = "SLURM_JOB_ID=4103 SLURM_JOB_NAME=train SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 \
    SLURM_NTASKS=8 SLURM_NNODES=2 SLURM_JOB_NODELIST=node[03-04] SLURM_TASKS_PER_NODE=4(x2)";

/// A shell that `salloc` has started on a node, as a step of its own.
const SALLOC: &str = "SLURM_JOB_ID=4103 SLURM_JOB_NAME=interactive SLURM_STEP_ID=4294967290 SLURM_PROCID=0 \
    SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8 SLURM_NNODES=1";

/// A shell that `srun --pty bash` has started on a node.
const PTY: &str = "SLURM_JOB_ID=4103 SLURM_JOB_NAME=bash SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 \
    SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1 SLURM_NNODES=1 SLURM_STEP_TASKS_PER_NODE=1";

/// The second of two processes of Open MPI 5.0's mpirun; variables unrelated to the launch are left out.
const OPEN_MPI: &str = "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 \
    PMIX_NAMESPACE=prterun-vm-14666@1 PMIX_RANK=1";

/// The second of two processes of MPICH 5.0's mpiexec.hydra.
const HYDRA: &str =
    "MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11 PMI_HOSTNAME=vm PMI_RANK=1 PMI_SIZE=2";

/// The last process of Cray's mpiexec, with two on each of two nodes.
const PALS: &str = "PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PMI_RANK=3 PMI_SIZE=4 \
    PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 MASTER_ADDR=x1000c0s0b0n0 MASTER_PORT=6000";

/// The second of two processes of MVAPICH's mpirun_rsh, of IBM's jsrun, and of `flux run -N2 -n4`.
const MVAPICH: &str = "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 \
    MV2_COMM_WORLD_LOCAL_SIZE=2";
const JSRUN: &str = "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1 \
    JSM_NAMESPACE_LOCAL_SIZE=2 PMIX_NAMESPACE=1";
const FLUX: &str = "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 \
    FLUX_JOB_ID=f2Ve MASTER_ADDR=a";

/// The first worker of a `PyTorchJob` with a master, by the older operator.
const PYTORCHJOB: &str = "MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=1 \
    PYTHONUNBUFFERED=0 KUBERNETES_PORT=tcp://10.0.0.1:443";

/// The first worker by the newer operator, with `nprocPerNode: 4`.
const PYTORCHJOB_4: &str = "MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=12 RANK=1 PET_NNODES=3 \
    PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456";

/// The second pod of a `TrainJob`.
const TRAINJOB: &str = "PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=1 \
    PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400";

fn by_hand() -> LaunchOptions {
    LaunchOptions {
        nnodes: Some(2),
        node_rank: Some(1),
        master_addr: Some("node1".into()),
        master_port: Some(4000),
        ..LaunchOptions::default()
    }
}

fn choose(launch: LaunchChoice) -> LaunchOptions {
    LaunchOptions { launch, ..LaunchOptions::default() }
}

/// Detects the launch from these variables; later ones win, and `NAME=` unsets one.
fn with(variables: &[&str], options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    let all = variables.iter().flat_map(|list| list.split_whitespace());
    let map: HashMap<&str, &str> = all.map(|pair| pair.split_once('=').unwrap()).collect();
    detect(&|name| Some(map.get(name)?.to_string()), options, gpus)
}

fn found(variables: &str) -> Launch {
    with(&[variables], &LaunchOptions::default(), 0).unwrap()
}

fn refused(variables: &[&str], options: &LaunchOptions) -> String {
    match with(variables, options, 0) {
        Err(Error::Input { problem: why, .. }) => why,
        other => panic!("{variables:?} gave {other:?}"),
    }
}

#[test]
fn launchers_are_detected_by_their_variables() {
    use LaunchChoice as Choice;
    let nobody = Choice::Local;
    for (variables, choice, kind, places, nnodes, master) in [
        (
            TORCHRUN,
            Choice::Torchrun,
            LaunchKind::Torchrun,
            (1, 2, 1, 2),
            Some(1),
            "127.0.0.1:29500",
        ),
        (VIRTUAL, Choice::Torchrun, LaunchKind::Torchrun, (1, 2, 0, 2), Some(1), "localhost:34803"),
        (ALONE, Choice::Torchrun, LaunchKind::Torchrun, (1, 2, 0, 1), Some(2), "node1:29500"),
        (SRUN, Choice::Slurm, LaunchKind::Slurm, (5, 8, 1, 2), Some(4), "node03:24417"),
        (SRUN_NODES, Choice::Slurm, LaunchKind::Slurm, (1, 2, 0, 1), Some(2), "a1b3:21865"),
        (OPEN_MPI, Choice::Mpi, LaunchKind::Mpi, (1, 2, 1, 2), Some(1), "127.0.0.1:22488"),
        (MVAPICH, Choice::Mpi, LaunchKind::Mpi, (1, 2, 1, 2), Some(1), "127.0.0.1:29500"),
        (JSRUN, Choice::Mpi, LaunchKind::Mpi, (1, 2, 1, 2), Some(1), "127.0.0.1:18464"),
        (FLUX, Choice::Mpi, LaunchKind::Mpi, (1, 4, 1, 2), Some(2), "a:15548"),
        (HYDRA, Choice::Mpi, LaunchKind::Mpi, (1, 2, 1, 2), Some(1), "127.0.0.1:29500"),
        (PALS, Choice::Mpi, LaunchKind::Mpi, (3, 4, 1, 2), None, "x1000c0s0b0n0:6000"),
        (
            PYTORCHJOB,
            Choice::Kubernetes,
            LaunchKind::Kubernetes,
            (1, 3, 0, 1),
            Some(3),
            "job-master-0:23456",
        ),
        (
            PYTORCHJOB_4,
            Choice::Kubernetes,
            LaunchKind::Kubernetes,
            (1, 3, 0, 1),
            Some(3),
            "job-master-0:23456",
        ),
        (
            TRAINJOB,
            Choice::Kubernetes,
            LaunchKind::Kubernetes,
            (1, 2, 0, 1),
            Some(2),
            "job-node-0-0.job:29400",
        ),
        (
            "PET_NNODES=1 PET_NODE_RANK=0",
            Choice::Kubernetes,
            LaunchKind::Kubernetes,
            (0, 1, 0, 1),
            Some(1),
            "",
        ),
        (SBATCH, nobody, LaunchKind::Local, (0, 1, 0, 1), Some(1), ""),
        (SALLOC, nobody, LaunchKind::Local, (0, 1, 0, 1), Some(1), ""),
        (PTY, nobody, LaunchKind::Local, (0, 1, 0, 1), Some(1), ""),
        ("PMI_RANK=0 PMI_SIZE=1", nobody, LaunchKind::Local, (0, 1, 0, 1), Some(1), ""),
        ("MASTER_ADDR=a MASTER_PORT=1", nobody, LaunchKind::Local, (0, 1, 0, 1), Some(1), ""),
    ] {
        for choice in [Choice::Auto, choice] {
            let launch = with(&[variables], &choose(choice), 0).unwrap();
            let Processes { index, count, local_index, local_count } = launch.processes;
            let master_is = launch.master.as_ref().map_or(String::new(), ToString::to_string);
            assert_eq!((launch.kind, launch.nnodes), (kind, nnodes), "{variables}");
            assert_eq!((index, count, local_index, local_count), places, "{variables}");
            assert_eq!(master_is, master, "{variables}");
        }
        let local = with(&[variables], &choose(Choice::Local), 0).unwrap();
        assert_eq!((local.kind, local.processes.count), (LaunchKind::Local, 1));
        assert_eq!(local.reason, "--launch local");
    }
}

#[test]
fn torchrun_specific_variables_are_read() {
    let launch = found(TORCHRUN);
    assert!(launch.master.unwrap().agent_store);
    assert_eq!((launch.run_id.as_str(), launch.threads_per_rank), ("none", Some(1)));
    assert_eq!(launch.error_file.unwrap().file_name().unwrap(), "error.json");
    assert_eq!(launch.reason, "RANK=1 WORLD_SIZE=2");
    let launch = found(VIRTUAL);
    assert!(!launch.master.unwrap().agent_store);
    assert_eq!((launch.run_id.as_str(), launch.error_file), ("job7", None));
    assert_eq!((launch.restart_count, launch.max_restarts), (2, 3));
    // A single worker needs no master.
    let one = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 TORCHELASTIC_ERROR_FILE=/tmp/e";
    let launch = found(one);
    assert_eq!((launch.master, launch.error_file.as_deref()), (None, Some(Path::new("/tmp/e"))));
}

#[test]
fn rank_count_per_process_follows_launcher_and_flags() {
    let ranks = |variables: &str, nproc, gpus| {
        let options = LaunchOptions { nproc, ..LaunchOptions::default() };
        with(&[variables], &options, gpus).unwrap().nproc
    };
    let (auto, one, two) = (Nproc::Auto, Nproc::Count(1), Nproc::Count(2));
    for (variables, nproc, gpus, expected) in [
        // torchrun, mpirun and srun were asked for one process per rank.
        (TORCHRUN, auto, 4, one),
        (VIRTUAL, auto, 1, one),
        (OPEN_MPI, auto, 2, one),
        (SRUN, auto, 2, one),
        // Several threads in each of several processes, if the flag asks for that.
        (TORCHRUN, two, 4, two),
        (SRUN, Nproc::Gpu, 2, Nproc::Gpu),
        // With one process on the machine, all GPUs are for that process.
        (ALONE, auto, 4, auto),
        (ALONE, one, 4, one),
        (ALONE, auto, 1, one),
        (ALONE, auto, 0, one),
        (SRUN_NODES, auto, 0, auto),
        (SRUN_NODES, two, 4, two),
        (TRAINJOB, auto, 0, auto),
        (PYTORCHJOB_4, auto, 4, auto),
        (PYTORCHJOB_4, two, 4, two),
        ("", auto, 4, auto),
    ] {
        assert_eq!(ranks(variables, nproc, gpus), expected, "{variables} with {gpus} GPUs");
    }
}

#[test]
fn nested_launchers_resolve_to_the_most_specific() {
    let kind = |variables: &[&str]| with(variables, &LaunchOptions::default(), 0).unwrap().kind;
    // Nested launchers: srun torchrun, torchrun in a pod, mpirun in a pod.
    assert_eq!(kind(&[SRUN_NODES, TORCHRUN]), LaunchKind::Torchrun);
    assert_eq!(kind(&[PYTORCHJOB_4, TORCHRUN]), LaunchKind::Torchrun);
    assert_eq!(kind(&["KUBERNETES_PORT=tcp://10.0.0.1:443", OPEN_MPI]), LaunchKind::Mpi);
    // mpirun starts its processes on other machines through srun.
    assert_eq!(kind(&[SRUN_NODES, OPEN_MPI]), LaunchKind::Mpi);
    assert_eq!(kind(&[SRUN_NODES, HYDRA]), LaunchKind::Mpi);
    // srun --mpi=pmi2.
    assert_eq!(kind(&[SRUN, "PMI_RANK=5 PMI_SIZE=8"]), LaunchKind::Slurm);
    // Variables that scripts often export beside srun.
    let exported = "RANK=5 WORLD_SIZE=8 MASTER_ADDR=node03 MASTER_PORT=4000";
    let launch = with(&[SRUN, exported], &LaunchOptions::default(), 0).unwrap();
    assert_eq!((launch.kind, launch.processes.local_index), (LaunchKind::Slurm, 1));
    assert_eq!(launch.master.unwrap().to_string(), "node03:4000");
    // A batch script is not a task. A step of one task may be a shell: srun --pty --mpi=pmi2 bash.
    let alone = "no launcher's variables are set for several processes";
    assert_eq!([found(SBATCH).reason, found(PTY).reason], [alone, alone]);
    assert_eq!(with(&[PTY], &choose(LaunchChoice::Slurm), 0).unwrap().kind, LaunchKind::Slurm);
    assert_eq!(kind(&[PTY, "PMI_RANK=0 PMI_SIZE=1"]), LaunchKind::Local);
}

#[test]
fn steps_of_one_job_meet_at_different_ports() {
    let port = |step: usize, job: usize| {
        let variables = format!("SLURM_STEP_ID={step} SLURM_JOB_ID={job}");
        with(&[SRUN, &variables], &LaunchOptions::default(), 0).unwrap().master.unwrap().port
    };
    let mut ports: Vec<u16> = (0..10_000).map(|step| port(step, 4242)).collect();
    ports.sort_unstable();
    ports.dedup();
    assert!(ports.len() == 10_000 && ports[0] == 15_000 && ports[9_999] == 24_999);
}

#[test]
fn launch_by_hand_takes_nodes_and_master_from_flags() {
    let launch = with(&[SBATCH], &by_hand(), 4).unwrap();
    assert_eq!(
        (launch.kind, launch.nproc, launch.nnodes),
        (LaunchKind::ByHand, Nproc::Auto, Some(2))
    );
    assert_eq!((launch.processes.index, launch.processes.count), (1, 2));
    let master = launch.master.unwrap();
    assert_eq!((master.to_string().as_str(), master.agent_store), ("node1:4000", false));
    let default_port = LaunchOptions { master_port: None, ..by_hand() };
    let ipv6 = LaunchOptions { master_addr: Some("fe80::1".into()), ..default_port };
    assert_eq!(with(&[], &ipv6, 0).unwrap().master.unwrap().to_string(), "[fe80::1]:29500");
    let brackets = LaunchOptions { master_addr: Some("[fe80::1]".into()), ..ipv6 };
    assert_eq!(with(&[], &brackets, 0).unwrap().master.unwrap().addr, "fe80::1");
    let with_zone = LaunchOptions { master_addr: Some("[fe80::1%eth0]".into()), ..brackets };
    assert_eq!(with(&[], &with_zone, 0).unwrap().master.unwrap().addr, "fe80::1%eth0");
    // One machine, from a script that counts them.
    let one = LaunchOptions { nnodes: Some(1), node_rank: Some(0), ..by_hand() };
    assert_eq!(with(&[], &one, 0).unwrap().kind, LaunchKind::Local);
    // torchrun's variables, ignored.
    let options = LaunchOptions { launch: LaunchChoice::Local, ..by_hand() };
    assert_eq!(with(&[TORCHRUN], &options, 0).unwrap().kind, LaunchKind::ByHand);
}

#[test]
fn flags_may_agree_with_or_complete_the_launcher() {
    // Flags that agree with the launcher.
    let agreeing =
        LaunchOptions { nnodes: Some(2), node_rank: Some(1), ..LaunchOptions::default() };
    for variables in [ALONE, SRUN_NODES, TRAINJOB] {
        assert_eq!(with(&[variables], &agreeing, 0).unwrap().processes.count, 2);
    }
    // Flags for what the launcher does not set.
    let master = LaunchOptions { nnodes: None, node_rank: None, ..by_hand() };
    for variables in [SRUN, OPEN_MPI, PALS] {
        let launch = with(&[variables], &master, 0).unwrap();
        assert_eq!(launch.master.unwrap().to_string(), "node1:4000");
    }
}

#[test]
fn address_of_the_store_has_the_name_of_where_it_comes_from() {
    for (variables, from) in [
        (TORCHRUN, "MASTER_ADDR"),
        (TRAINJOB, "PET_MASTER_ADDR"),
        (SRUN, "SLURM_STEP_NODELIST"),
        (OPEN_MPI, "--master-addr"),
    ] {
        assert_eq!(found(variables).master.unwrap().from, from);
    }
}

#[test]
fn first_host_of_a_list_is_that_of_slurm() {
    for (list, first) in [
        ("login1", "login1"),
        ("a,b,c", "a"),
        ("node[01-03,07],login1", "node01"),
        ("node[7]", "node7"),
        ("node[098-102]-ib0", "node098-ib0"),
        ("a[1-2]b[3-4]", "a1b3"),
        ("login1,a[1-2]b[03-04,9]x", "login1"),
        ("dgx-1.cluster_2.example.org", "dgx-1.cluster_2.example.org"),
        ("[1-3]", "1"),
        ("a[1-2", "a[1-2"),
        ("", ""),
    ] {
        assert_eq!(table::first_host(list), first, "{list}");
    }
}

#[test]
fn node_share_has_index_cores_and_threads() {
    let share = |variables: &str, cores| found(variables).share(cores);
    let second = NodeSlice { index: 1, count: 2, is_alone: false, ..NodeSlice::all(0) };
    assert_eq!(share(TORCHRUN, 8), NodeSlice { cores: 4, threads_per_rank: Some(1), ..second });
    // `OMP_NUM_THREADS` also counts without a launcher.
    assert_eq!(share("OMP_NUM_THREADS=3,2", 6).threads_per_rank, Some(3));
    assert_eq!(share(OPEN_MPI, 1), NodeSlice { cores: 1, ..second });
    // srun binds a task to its cores, so it sees only those.
    assert_eq!(share(SRUN, 6), NodeSlice { cores: 6, ..second });
    assert_eq!(share("", 8), NodeSlice::all(8));
}
