//! Groups as PyTorch has them, over sockets: what they refuse, and how they end. With PyTorch in them, and what each
//! operation returns: `make mixed`.

use std::time::Duration;

use ddp_mp::process_group::c10d::{ProcessGroupGloo, TcpStore};
use ddp_mp::{Error, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

/// No test waits for this long.
const TIMEOUT: Duration = Duration::from_secs(60);

#[track_caller]
fn refused(result: Result<()>, why: &str) {
    let error = result.unwrap_err();
    assert!(!matches!(error, Error::Cancelled { .. }));
    assert!(error.to_string().contains(why), "{error}");
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
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let group = ProcessGroupGloo::new(&store, "it", 0, 1, TIMEOUT).unwrap();
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
}
