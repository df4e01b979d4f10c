//! Hundreds of ranks in one process: memory, and what changes when each of them has a tensor for each other.

use std::process::Command;

use ddp_mp::os::peak_memory;
use ddp_mp::{Error, ReduceOp};
use tch::Tensor;

use crate::harness::{ranks, run_command_to, run_end, run_to, runs_every_case};

/// So many ranks with a list each have more tensors than each of them looks at: the first looks for all.
const MANY: usize = 70;

fn one(value: usize) -> Tensor {
    Tensor::from_slice(&[value as i64])
}

fn list(world_size: usize, value: impl Fn(usize) -> usize) -> Vec<Tensor> {
    (0..world_size).map(|rank| one(value(rank))).collect()
}

fn values(list: &[Tensor]) -> Vec<usize> {
    list.iter().map(|it| it.int64_value(&[0]) as usize).collect()
}

#[test]
fn tensor_lists_of_70_ranks_arrive() {
    ranks(MANY, |rank, group| {
        let (me, count) = (rank.rank(), rank.world_size());
        for round in 0..3 {
            let mut all = list(count, |_| 0);
            group.all_gather(&mut all, &one(me + round))?;
            assert_eq!(values(&all), (round..count + round).collect::<Vec<_>>());
            let mut received = list(count, |_| 0);
            group.all_to_all(&mut received, &list(count, |to| 1000 * me + to))?;
            assert_eq!(values(&received), (0..count).map(|it| 1000 * it + me).collect::<Vec<_>>());
            let mut sum = one(0);
            group.reduce_scatter(&mut sum, &list(count, |to| me * to), ReduceOp::Sum)?;
            assert_eq!(values(&[sum]), [me * count * (count - 1) / 2]);
        }
        let names = group.all_gather_object(&format!("rank {}", "x".repeat(me)))?;
        assert!((0..count).all(|rank| names[rank].len() == 5 + rank));
        Ok(())
    });
}

#[test]
fn overlapping_memory_among_70_ranks_is_refused_on_all() {
    let shared = ddp_mp::ffi::SharedTensor::new(one(0));
    let errors = ranks(MANY, move |rank, group| {
        let mut outputs = list(MANY, |_| 0);
        if [17, 42].contains(&rank.rank()) {
            outputs[3] = shared.get();
        }
        let error = group.all_gather(&mut outputs, &one(1)).unwrap_err();
        // It has ended nothing: the ranks agree, and go on.
        let mut after = list(MANY, |_| 0);
        group.all_gather(&mut after, &one(rank.rank()))?;
        assert_eq!(values(&after), (0..MANY).collect::<Vec<_>>());
        Ok(error)
    });
    for error in errors {
        assert!(matches!(error, Error::OverlappingTensors { first: 17, second: 42 }), "{error}");
    }
}

#[test]
fn size_mismatch_among_70_ranks_is_reported_to_all() {
    let errors = ranks(MANY, |rank, group| {
        let mut outputs = list(MANY, |_| 0);
        if rank.rank() == 9 {
            outputs[50] = Tensor::from_slice(&[0i64; 2]);
        }
        Ok(group.all_to_all(&mut outputs, &list(MANY, |_| 1)).unwrap_err().to_string())
    });
    for error in errors {
        assert!(error.contains("in all_to_all rank 50 sends 1 elements at "), "{error}");
        assert!(error.contains(" to rank 9, which expects 2"), "{error}");
    }
}

#[test]
fn run_of_hundreds_of_ranks_takes_a_few_mb_for_each() {
    // `make test-all` tries a thousand threads.
    let (count, most) = if runs_every_case() { (1000, 1e9) } else { (384, 600e6) };
    let nproc = format!("--nproc-per-node={count}");
    let (stdout, _) = run_to(0, &["comm", "barrier", &nproc]);
    assert!(stdout.contains("\nbarrier\n"), "{stdout}");
    let end = run_end(&[&nproc, "--max-steps=2", "--batch-size=2"]);
    let peak = end["peak_memory_bytes"].as_f64().unwrap();
    println!("{peak} bytes");
    assert!(peak < most, "{peak} bytes"); // with 384 ranks it once took 2.1e9
}

/// Lists on many ranks, in a process of its own, whose memory is measured.
#[test]
#[ignore = "run by another test, in a process of its own"]
fn all_to_all_child() {
    const RANKS: usize = 256;
    ranks(RANKS, |rank, group| {
        let mut outputs = list(RANKS, |_| 0);
        group.all_to_all(&mut outputs, &list(RANKS, |_| rank.rank()))?;
        assert_eq!(values(&outputs), (0..RANKS).collect::<Vec<_>>());
        Ok(())
    });
    let peak = peak_memory().unwrap() as f64;
    println!("{peak} bytes");
    assert!(peak < 700e6, "{peak} bytes"); // a list of all tensors on each rank would take 1.1e9 alone
}

#[test]
fn all_to_all_on_256_ranks_stays_below_700_mb() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "many_ranks::all_to_all_child", "--nocapture"]);
    assert!(run_command_to(0, command).0.contains("1 passed"));
}
