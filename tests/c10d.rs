//! Groups as PyTorch has them, over sockets, with threads as ranks. With PyTorch in them: `make mixed`.

use std::thread;
use std::time::Duration;

use ddp_mp::process_group::c10d::{ProcessGroupGloo, TcpStore};
use ddp_mp::{Error, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

/// No test waits for this long.
const TIMEOUT: Duration = Duration::from_secs(60);

fn on_ranks(size: usize, f: impl Fn(&ProcessGroupGloo) + Sync) {
    let server = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    thread::scope(|scope| {
        for rank in 0..size {
            let (f, port) = (&f, server.port());
            scope.spawn(move || {
                let store = TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap();
                let group = ProcessGroupGloo::new(&store, "it", rank, size, TIMEOUT).unwrap();
                f(&group);
                // Nobody leaves while others need it. (Gloo's barrier also fails by what has just failed before it.)
                if size > 1 {
                    group.barrier().unwrap();
                }
            });
        }
    });
}

fn ints(values: &[i64]) -> Tensor {
    Tensor::from_slice(values)
}

#[track_caller]
fn refused(result: Result<()>, why: &str) {
    let error = result.unwrap_err();
    assert!(!matches!(error, Error::Cancelled { .. }));
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn collectives_match_pytorch_definitions() {
    for size in 1..=3 {
        on_ranks(size, |group| {
            let (rank, n) = (group.rank() as i64, size as i64);
            assert_eq!(group.size(), size);
            let lists = || -> Vec<Tensor> { (0..n).map(|_| ints(&[0, 0])).collect() };
            let mine = ints(&[rank, -rank]);
            for (op, expected) in [
                (ReduceOp::Sum, (0..n).map(|r| r + 5).sum::<i64>()),
                (ReduceOp::Product, (0..n).map(|r| r + 5).product()),
                (ReduceOp::Min, 5),
                (ReduceOp::Max, n + 4),
                (ReduceOp::Band, (0..n).map(|r| r + 5).fold(-1, |a, b| a & b)),
                (ReduceOp::Bor, (0..n).map(|r| r + 5).fold(0, |a, b| a | b)),
                (ReduceOp::Bxor, (0..n).map(|r| r + 5).fold(0, |a, b| a ^ b)),
            ] {
                let mut tensor = ints(&[rank + 5; 3]);
                group.all_reduce(&mut tensor, op).unwrap();
                assert_eq!(tensor, ints(&[expected; 3]), "{op}");
            }
            let mut all = lists();
            group.all_gather(&mut all, &mine).unwrap();
            all.iter().zip(0..).for_each(|(it, r)| assert_eq!(*it, ints(&[r, -r])));
            for root in 0..size {
                let mut tensor = mine.copy();
                group.broadcast(&mut tensor, root).unwrap();
                assert_eq!(tensor, ints(&[root as i64, -(root as i64)]));
                let mut tensor = mine.copy();
                group.reduce(&mut tensor, root, ReduceOp::Sum).unwrap();
                let mut list = (group.rank() == root).then(lists);
                group.gather(&mine, list.as_deref_mut(), root).unwrap();
                if let Some(list) = &list {
                    assert_eq!(tensor, ints(&[n * (n - 1) / 2, -n * (n - 1) / 2]));
                    list.iter().zip(0..).for_each(|(it, r)| assert_eq!(*it, ints(&[r, -r])));
                }
                let mut tensor = ints(&[9, 9]);
                group.scatter(&mut tensor, list.as_deref(), root).unwrap();
                assert_eq!(tensor, mine);
            }
            let mut tensor = ints(&[0, 0]);
            let input = Tensor::arange(2 * n, (Kind::Int64, Device::Cpu));
            group.reduce_scatter_single(&mut tensor, &input, ReduceOp::Sum).unwrap();
            assert_eq!(tensor, ints(&[n * 2 * rank, n * (2 * rank + 1)]));
            // Rank r sends r rows to rank 0 and none to others.
            let to: Vec<i64> = (0..n).map(|to| if to == 0 { rank } else { 0 }).collect();
            let from: Vec<i64> = (0..n).map(|from| if rank == 0 { from } else { 0 }).collect();
            let mut tensor = Tensor::zeros([from.iter().sum()], (Kind::Int64, Device::Cpu));
            let input = Tensor::full([rank], rank, (Kind::Int64, Device::Cpu));
            group.all_to_all_single(&mut tensor, &input, Some(&from), Some(&to)).unwrap();
            if rank == 0 {
                let expected: Vec<i64> = (0..n).flat_map(|r| vec![r; r as usize]).collect();
                assert_eq!(tensor, ints(&expected));
            }
            if size > 1 && rank == 0 {
                group.send(&ints(&[7]), 1, 9).unwrap();
            } else if rank == 1 {
                let mut tensor = ints(&[0]);
                group.recv(&mut tensor, 0, 9).unwrap();
                assert_eq!(tensor, ints(&[7]));
            }
        });
    }
}

#[test]
fn store_key_is_visible_to_another_connection() {
    let server = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let client = TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap();
    client.set("key", b"value").unwrap();
    assert_eq!(server.get("key", TIMEOUT).unwrap().as_deref(), Some(&b"value"[..]));
    assert_eq!(server.get("other", Duration::from_millis(1)).unwrap(), None);
}

#[test]
fn join_with_missing_or_invalid_ranks_is_an_error() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let join = |rank, size| {
        let limit = Duration::from_millis(50);
        ProcessGroupGloo::new(&store, &format!("{rank} of {size}"), rank, size, limit).map(drop)
    };
    refused(join(2, 2), "there is no rank 2 in a group of 2");
    refused(join(0, 0), "there is no rank 0 in a group of 0");
    refused(join(1, 2), "connecting to all ranks under \"1 of 2\"");
    join(0, 1).unwrap();
}

#[test]
fn unsupported_arguments_are_refused_with_a_reason() {
    on_ranks(1, |group| {
        let floats = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let reduce = |mut tensor: Tensor, op| group.all_reduce(&mut tensor, op);
        refused(reduce(floats(), ReduceOp::Avg), "all_reduce(avg): Gloo has none");
        refused(reduce(floats(), ReduceOp::Band), "it is for integers and bool");
        refused(reduce(floats().tr(), ReduceOp::Sum), "not contiguous");
        refused(
            reduce(floats().to_sparse(None, None::<&[i64]>, None), ReduceOp::Sum),
            "not contiguous",
        );
        refused(reduce(Tensor::new(), ReduceOp::Sum), "undefined");
        refused(group.broadcast(&mut floats(), 1), "no rank 1 in a group of 1");
        refused(group.send(&floats(), 0, 0), "this is rank 0 itself");
        refused(group.recv(&mut floats(), 3, 0), "no rank 3 in a group of 1");
        refused(group.gather(&floats(), None, 0), "rank 0 must pass the list");
        refused(group.all_gather(&mut [], &floats()), "all_gather");
        let three = Some(&[3][..]);
        let all_to_all = |to, from| group.all_to_all_single(&mut floats(), &floats(), to, from);
        refused(all_to_all(three, None), "splits");
        refused(all_to_all(three, three), "all_to_all");
        refused(all_to_all(Some(&[-2]), Some(&[2])), "-2 rows");
        let mut part = Tensor::zeros([4], (Kind::Float, Device::Cpu));
        let scattered = group.reduce_scatter_single(&mut part, &floats(), ReduceOp::Sum);
        refused(scattered, "the input of shape [2, 3] is not 1 times the output, [4]");
    });
}

#[test]
fn all_reduce_fails_after_a_rank_left() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let join = |rank| ProcessGroupGloo::new(&store, "it", rank, 2, TIMEOUT).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| drop(join(1)));
        refused(join(0).all_reduce(&mut ints(&[1]), ReduceOp::Sum), "gloo failed in all_reduce");
    });
}
