//! Tests of wrong variables and flags, and of arbitrary environments.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::*;

#[test]
fn invalid_variables_are_refused_by_name() {
    let auto = LaunchOptions::default();
    let uneven = "SLURM_STEP_NUM_TASKS=8 are not as many on each of SLURM_STEP_NUM_NODES=4; start as many on each node;";
    for (variables, complaint) in [
        (&["RANK=0"][..], "not set: WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE;"),
        (&["WORLD_SIZE=2"], "not set: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE;"),
        (&["LOCAL_RANK=0"], "not set: RANK, WORLD_SIZE, LOCAL_WORLD_SIZE;"),
        (&[SBATCH, "WORLD_SIZE=8"], "not set: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE;"),
        (&[TORCHRUN, "WORLD_SIZE="], "not set: WORLD_SIZE;"),
        (&[TORCHRUN, "LOCAL_WORLD_SIZE="], "not set: LOCAL_WORLD_SIZE;"),
        (&[TORCHRUN, "RANK=2"], "RANK=2 must be below WORLD_SIZE=2"),
        (&[TORCHRUN, "RANK=0 WORLD_SIZE=0"], "RANK=0 must be below WORLD_SIZE=0"),
        (&[TORCHRUN, "LOCAL_RANK=2"], "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        (&[TORCHRUN, "LOCAL_WORLD_SIZE=3"], "LOCAL_WORLD_SIZE=3 must be at most WORLD_SIZE=2"),
        (&[TORCHRUN, "RANK=1:1"], "RANK=\"1:1\" is not a whole number"),
        (&[TORCHRUN, "RANK=one"], "RANK=\"one\" is not a whole number"),
        (&[TORCHRUN, "RANK=-1"], "RANK=\"-1\" is not a whole number"),
        (&[TORCHRUN, "RANK=99999999999"], "RANK=\"99999999999\" is not a whole number"),
        (&[ALONE, "MASTER_ADDR="], "processes on several machines need --master-addr"),
        (
            &[TORCHRUN, "MASTER_PORT=0"],
            "MASTER_PORT=\"0\" is not a port; use a number from 1 to 65535",
        ),
        (&[TORCHRUN, "MASTER_PORT=65536"], "MASTER_PORT=\"65536\" is not a port"),
        (&[TORCHRUN, "MASTER_ADDR=a:1"], "MASTER_ADDR=\"a:1\" has a port in it"),
        (&[TORCHRUN, "MASTER_ADDR=tcp://a"], "MASTER_ADDR=\"tcp://a\" is not a host name"),
        (&[TORCHRUN, "TORCHELASTIC_RESTART_COUNT=x"], "TORCHELASTIC_RESTART_COUNT=\"x\" is not"),
        (&[TORCHRUN, "OMP_NUM_THREADS=0"], "OMP_NUM_THREADS=\"0\" is not a number of threads"),
        (&[SRUN, "SLURM_PROCID=8"], "SLURM_PROCID=8 must be below SLURM_STEP_NUM_TASKS=8"),
        (&[SRUN, "SLURM_LOCALID=2"], uneven),
        (&[SRUN, "SLURM_STEP_TASKS_PER_NODE=3,2(x2),1"], uneven),
        (&[SRUN, "SLURM_STEP_TASKS_PER_NODE= SLURM_TASKS_PER_NODE=3,2(x2),1"], uneven),
        (&[SRUN, "SLURM_LOCALID="], "not set: SLURM_LOCALID;"),
        (&[SRUN, "SLURM_PROCID="], "not set: SLURM_PROCID;"),
        (
            &["SLURM_PROCID=1 SLURM_STEP_ID=0"],
            "not set: SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_LOCALID;",
        ),
        (
            &[SRUN, "SLURM_STEP_NUM_TASKS=7"],
            "SLURM_STEP_NUM_TASKS=7 are not as many on each of SLURM_STEP_NUM_NODES=4",
        ),
        (&[SRUN, "SLURM_STEP_NODELIST=node[03"], "SLURM_STEP_NODELIST=\"node[03\" is not a host"),
        (&[SRUN, "SLURM_STEP_NODELIST= SLURM_JOB_NODELIST="], "processes on several machines need"),
        (&["DDP_MP_SPAWNED=1"], "DDP_MP_SPAWNED: "),
        (
            &["DDP_MP_SPAWNED={\"rank\":[3,2],\"port\":1,\"restart_count\":0,\"max_restarts\":0}"],
            "DDP_MP_SPAWNED: rank 3 of 2; ddp-mp sets it",
        ),
        (&["OMP_NUM_THREADS=many"], "OMP_NUM_THREADS=\"many\" is not a number of threads"),
        (&[SRUN, "RANK=2"], "RANK=2 contradicts SLURM_PROCID=5"),
        (&[OPEN_MPI, "OMPI_COMM_WORLD_SIZE="], "not set: OMPI_COMM_WORLD_SIZE;"),
        (
            &[OPEN_MPI, "OMPI_COMM_WORLD_RANK=2"],
            "OMPI_COMM_WORLD_RANK=2 must be below OMPI_COMM_WORLD",
        ),
        (
            &[OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE=3"],
            "OMPI_COMM_WORLD_LOCAL_SIZE=3 must be at most OMPI_COMM_WORLD_SIZE=2",
        ),
        (&[OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4"], "processes on several machines need --master-addr"),
        (&[OPEN_MPI, "RANK=0"], "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1"),
        (&[HYDRA, "MPI_LOCALRANKID=2"], "MPI_LOCALRANKID=2 must be below MPI_LOCALNRANKS=2"),
        (&[PYTORCHJOB, "RANK=3"], "RANK=3 must be below WORLD_SIZE=3"),
        (&[PYTORCHJOB_4, "RANK=2"], "RANK=2 contradicts PET_NODE_RANK=1"),
        (
            &[TRAINJOB, "PET_NNODES=1:4"],
            "PET_NNODES=\"1:4\" is not a whole number from 0; for a range use torchrun",
        ),
        (&[TRAINJOB, "PET_NNODES=0"], "PET_NODE_RANK=1 must be below PET_NNODES=0"),
        (&[TRAINJOB, "PET_NODE_RANK="], "not set: PET_NODE_RANK;"),
        (&[TRAINJOB, "PET_MASTER_ADDR="], "processes on several machines need --master-addr"),
    ] {
        let why = refused(variables, &auto);
        assert!(why.starts_with(complaint), "{variables:?} gave {why:?}");
    }
}

#[test]
fn requested_launcher_without_its_variables_is_refused() {
    for (choice, variables, complaint) in [
        (LaunchChoice::Torchrun, "", "not set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE;"),
        (LaunchChoice::Torchrun, SRUN, "not set: RANK, WORLD_SIZE"),
        (
            LaunchChoice::Slurm,
            TORCHRUN,
            "not set: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM",
        ),
        (LaunchChoice::Slurm, SBATCH, "not set: SLURM_STEP_ID;"),
        (LaunchChoice::Slurm, SALLOC, "not set: SLURM_STEP_ID;"),
        (LaunchChoice::Mpi, SRUN, "not set: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"),
        (LaunchChoice::Kubernetes, "", "not set: PET_NODE_RANK, PET_NNODES;"),
    ] {
        let why = refused(&[variables], &choose(choice));
        assert!(why.starts_with(complaint), "{variables} gave {why:?}");
    }
}

#[test]
fn flags_that_contradict_the_launcher_are_refused() {
    let default = LaunchOptions::default;
    let nnodes = LaunchOptions { nnodes: Some(5), ..default() };
    let node_rank = LaunchOptions { node_rank: Some(9), ..default() };
    let addr = LaunchOptions { master_addr: Some("b".into()), ..default() };
    let port = LaunchOptions { master_port: Some(1), ..default() };
    for (variables, options, complaint) in [
        (TORCHRUN, &nnodes, "--nnodes=5 contradicts GROUP_WORLD_SIZE=1; check what sets them"),
        (TORCHRUN, &node_rank, "--node-rank=9 contradicts GROUP_RANK=0"),
        (SRUN, &nnodes, "--nnodes=5 contradicts SLURM_STEP_NUM_NODES=4"),
        (SRUN, &node_rank, "--node-rank=9 contradicts SLURM_NODEID=2"),
        (PYTORCHJOB, &nnodes, "--nnodes=5 contradicts WORLD_SIZE=3"),
        (OPEN_MPI, &nnodes, "--nnodes=5 contradicts machines=1"),
        (OPEN_MPI, &node_rank, "--node-rank=9 contradicts machine=0"),
        (PALS, &nnodes, "--nnodes=5 cannot be checked with mpirun; leave it out"),
        ("", &node_rank, "not set: --nnodes;"),
        (
            "",
            &LaunchOptions { nnodes: Some(1), ..node_rank.clone() },
            "--node-rank=9 must be below --nnodes=1",
        ),
        ("", &addr, "not set: --node-rank, --nnodes;"),
        ("", &port, "not set: --node-rank, --nnodes;"),
        ("", &nnodes, "not set: --node-rank;"),
        (
            "",
            &LaunchOptions { nnodes: Some(9), ..node_rank.clone() },
            "--node-rank=9 must be below --nnodes=9",
        ),
        (
            "",
            &LaunchOptions { nnodes: Some(10), ..node_rank.clone() },
            "processes on several machines need --master-addr",
        ),
        (
            SRUN,
            &LaunchOptions { master_addr: Some("b:1".into()), ..default() },
            "--master-addr=\"b:1\" has a",
        ),
    ] {
        let why = refused(&[variables], options);
        assert!(why.starts_with(complaint), "{variables} gave {why:?}");
    }
}

/// Every variable that the launchers read.
const NAMES: &str = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR \
    MASTER_PORT OMP_NUM_THREADS TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS \
    TORCHELASTIC_ERROR_FILE TORCHELASTIC_USE_AGENT_STORE SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_STEP_ID \
    SLURM_STEPID SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS \
    SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE \
    SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_NODELIST SLURM_CPUS_PER_TASK OMPI_COMM_WORLD_RANK \
    OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE PMIX_NAMESPACE PMI_RANK PMI_SIZE \
    PMI_LOCAL_RANK PMI_LOCAL_SIZE PALS_RANKID PALS_LOCAL_RANKID PALS_LOCAL_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS \
    PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT PET_RDZV_ID";

fn any_environment() -> impl Strategy<Value = (Vec<(String, String)>, LaunchOptions)> {
    let names: Vec<String> = NAMES.split_whitespace().map(String::from).collect();
    let value = prop_oneof![
        6 => (0u32..4).prop_map(|number| number.to_string()),
        1 => Just("4294967295".to_string()),
        1 => "[a-z]{1,2}(\\[[0-9]{1,3}(-[0-9]{1,12})?\\])?|[0-9](\\(x[0-9]{1,12}\\))?(,[0-9])?",
        1 => ".{0,12}",
    ];
    let whole = [TORCHRUN, SRUN, SRUN_NODES, OPEN_MPI, HYDRA, PALS, PYTORCHJOB_4, TRAINJOB, ""];
    let pairs = |list: &str| -> Vec<(String, String)> {
        let pairs = list.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.into(), value.into())).collect()
    };
    let base = proptest::sample::select(whole.map(pairs).to_vec());
    let changed = proptest::collection::vec((proptest::sample::select(names), value), 0..12);
    use LaunchChoice as L;
    let choice = proptest::sample::select(vec![
        L::Auto,
        L::Auto,
        L::Local,
        L::Torchrun,
        L::Slurm,
        L::Mpi,
        L::Kubernetes,
    ]);
    let number = || proptest::option::weighted(0.2, 0usize..4);
    let addr = proptest::option::weighted(0.2, ".{0,8}");
    let nproc =
        proptest::sample::select(vec![Nproc::Auto, Nproc::Gpu, Nproc::Cpu, Nproc::Count(3)]);
    (base, changed, choice, number(), number(), addr, nproc).prop_map(
        |(mut variables, changed, launch, nnodes, node_rank, master_addr, nproc)| {
            variables.extend(changed);
            let default = LaunchOptions::default();
            let options =
                LaunchOptions { launch, nnodes, node_rank, master_addr, nproc, ..default };
            (variables, options)
        },
    )
}

proptest! {
    #![proptest_config(Config { cases: 2000, failure_persistence: None, ..Config::default() })]

    #[test]
    fn detect_in_a_random_environment_is_consistent((variables, options) in any_environment(), gpus in 0usize..5) {
        let map: HashMap<_, _> = variables.iter().cloned().collect();
        match detect(&|name| map.get(name).cloned(), &options, gpus) {
            Ok(launch) => {
                let Processes { index, count, local_index, local_count } = launch.processes;
                prop_assert!(index < count && local_index < local_count && local_count <= count);
                prop_assert_eq!(launch.master.is_some(), count > 1);
                prop_assert!(!launch.reason.is_empty() && !launch.run_id.is_empty());
                prop_assert!(launch.share(2).cores >= 1);
                if options.launch == LaunchChoice::Local {
                    prop_assert!([LaunchKind::Local, LaunchKind::ByHand].contains(&launch.kind));
                }
            }
            Err(Error::Input { problem: why, .. }) => prop_assert!(why.len() < 600 && !why.contains('\n'), "{}", why),
            Err(other) => prop_assert!(false, "{:?}", other),
        }
    }
}
