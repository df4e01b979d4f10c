//! The `gloo` backend, with several processes' worth of ranks in this one: what they reduce, and in which precision.

use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ddp_mp::ddp::{CommHook, Compress, GradBucket, hook_fn};
use ddp_mp::launch::{BackendChoice, LaunchOptions, Nproc, Share, World, detect, place};
use ddp_mp::torch::cuda::Cuda;
use ddp_mp::{Backend, ProcessGroup, Rank, ReduceOp, Spawn, SpawnError};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, ranks};
use crate::processes::free_port;

/// Runs `f` on ranks of several processes, `counts` of them each, and returns what each process ended with. The processes
/// are threads of this one that share nothing but a store and the network.
pub(crate) fn try_processes<T: Send + 'static>(
    counts: &[usize],
    timeout: Duration,
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Vec<Result<Vec<T>, Box<SpawnError>>> {
    let (port, f) = (free_port(), Arc::new(f));
    let process = |(process, &count): (usize, &usize)| {
        let options = LaunchOptions {
            nnodes: Some(counts.len()),
            node_rank: Some(process),
            master_addr: Some("127.0.0.1".into()),
            master_port: Some(port),
            nproc: Nproc::Count(count),
            ..LaunchOptions::default()
        };
        let launch = detect(&|_| None, &options, 0).unwrap();
        let (nproc, choice) = (launch.nproc, BackendChoice::Auto);
        let placement = place(nproc, choice, &Cuda::default(), &Share::all(1)).unwrap();
        let placement = placement.in_processes(launch.processes.count, choice).unwrap();
        let world = World::meet(&launch, &placement, TIMEOUT, None, Vec::new()).unwrap().unwrap();
        let spawn = Spawn::at(&placement).threads_per_rank(1).world(Some(world.into()));
        let f = f.clone();
        spawn.timeout(timeout).grace_period(TIMEOUT).run(move |rank| {
            let group = rank.init_process_group(Backend::Gloo)?;
            f(rank, group)
        })
    };
    thread::scope(|scope| {
        let start = |it| scope.spawn(move || process(it));
        let threads: Vec<_> = counts.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// As [`try_processes`], for ranks that must not fail: what each has returned, in their order.
pub(crate) fn processes<T: Send + 'static>(
    counts: &[usize],
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    let ended = try_processes(counts, TIMEOUT, f);
    let well = |it: Result<Vec<T>, _>| it.unwrap_or_else(|error| panic!("{counts:?}: {error}"));
    ended.into_iter().flat_map(well).collect()
}

const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::PremulSum(0.25),
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
];

/// Numbers of which those of four ranks have an exact sum and product in float32, and none in a half-precision kind
/// whose own sums of two are exact as well.
fn halves(rank: usize, len: i64, kind: Kind, op: ReduceOp) -> Tensor {
    let index = Tensor::arange(len, (Kind::Int64, Device::Cpu)) * 37 + 101 * (rank as i64 + 1);
    let bits = if kind == Kind::Half { 11 } else { 8 };
    let numbers = match op {
        ReduceOp::Product => index.remainder(1 << (bits / 2)) + 1,
        _ => index.remainder(1 << bits) + 1 - (1 << (bits - 1)),
    };
    numbers.to_kind(Kind::Float).to_kind(kind)
}

/// What each rank has of all reductions, as bits.
fn reductions(rank: &Rank, group: &ProcessGroup) -> anyhow::Result<Vec<(String, Vec<i16>)>> {
    let (me, count) = (rank.rank(), rank.world_size());
    let mut all = Vec::new();
    // In a note, in one exchange, in slices.
    for (kind, len) in [Kind::Half, Kind::BFloat16]
        .into_iter()
        .flat_map(|kind| [7, 3000, 50_001].map(|len| (kind, len)))
    {
        let mut keep = |name: &str, op, tensor: &Tensor| {
            let bits = Vec::<i16>::try_from(tensor.view_dtype(Kind::Int16)).unwrap();
            all.push((format!("{name} {op} {kind:?} {len}"), bits));
        };
        for op in OPS {
            let mine = halves(me, len, kind, op);
            let mut tensor = mine.copy();
            group.all_reduce(&mut tensor, op)?;
            keep("all_reduce", op, &tensor);
            for root in 0..count {
                let mut tensor = mine.copy();
                group.reduce(&mut tensor, root, op)?;
                keep(&format!("reduce to {root}"), op, &tensor);
            }
            let list: Vec<Tensor> = (0..count).map(|to| mine.roll([to as i64], [0])).collect();
            let mut tensor = mine.zeros_like();
            group.reduce_scatter(&mut tensor, &list, op)?;
            keep("reduce_scatter", op, &tensor);
        }
        // Whose sum is beyond float16, and whose average is not.
        let mut tensor = Tensor::full([len], 40000., (kind, Device::Cpu));
        group.all_reduce(&mut tensor, ReduceOp::Avg)?;
        keep("large", ReduceOp::Avg, &tensor);
    }
    Ok(all)
}

/// What each rank has of a bucket after each way to average it, as bits.
fn averages(rank: &Rank, group: &ProcessGroup) -> anyhow::Result<Vec<(String, Vec<i32>)>> {
    let premultiplied = hook_fn("bf16 premultiplied", |bucket, group: &ProcessGroup| {
        let mut small = bucket.gradients.to_kind(Kind::BFloat16);
        group.all_reduce(&mut small, ReduceOp::PremulSum(1. / group.world_size() as f64))?;
        bucket.gradients.copy_(&small);
        Ok(())
    });
    let hooks: [Box<dyn CommHook>; 3] =
        [Box::new(Compress::fp16()), Box::new(Compress::bf16()), premultiplied];
    let mut all = Vec::new();
    for mut hook in hooks {
        let mut gradients = halves(rank.rank(), 50_000, Kind::BFloat16, ReduceOp::Avg);
        gradients = gradients.to_kind(Kind::Float) * 300.;
        let parameters = [(0, vec![50_000])];
        let mut bucket = GradBucket {
            index: 0,
            is_last: true,
            gradients: &mut gradients,
            parameters: &parameters,
        };
        hook.reduce(&mut bucket, group)?;
        assert!(gradients.isfinite().all().int64_value(&[]) == 1, "{}", hook.name());
        all.push((hook.name().into(), gradients.view_dtype(Kind::Int).try_into()?));
    }
    Ok(all)
}

const LAYOUTS: [&[usize]; 5] = [&[1, 1], &[1, 1, 1, 1], &[2, 2], &[3, 1], &[1, 2, 1]];

#[test]
fn half_precision_is_reduced_as_by_threads() {
    for counts in LAYOUTS {
        let threads = ranks(counts.iter().sum(), |rank, group| reductions(rank, &group));
        let across = processes(counts, |rank, group| reductions(rank, &group));
        for (rank, (threads, across)) in threads.iter().zip(&across).enumerate() {
            for ((name, expected), (_, found)) in threads.iter().zip(across) {
                let differ = expected.iter().zip(found).filter(|(a, b)| a != b).count();
                assert_eq!(differ, 0, "{counts:?}, rank {rank}, {name}: {differ} numbers differ");
            }
        }
    }
}

#[test]
fn hooks_average_half_precision_as_by_threads() {
    for counts in LAYOUTS {
        let threads = ranks(counts.iter().sum(), |rank, group| averages(rank, &group));
        let across = processes(counts, |rank, group| averages(rank, &group));
        assert!(threads == across, "{counts:?}");
    }
}
