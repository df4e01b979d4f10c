//! Tensors that a collective writes to: those whose elements share memory are refused before the ranks meet, all
//! others are filled.

use ddp_mp::{P2POp, ProcessGroup, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

use crate::harness::ranks;

fn filled(shape: &[i64], value: f64) -> Tensor {
    Tensor::full(shape, value, (Kind::Float, Device::Cpu))
}

/// Four rows that are one row of three.
fn expanded() -> Tensor {
    filled(&[1, 3], 0.0).expand([4, 3], false)
}

/// The four rows of three, in column order with a gap after each column: not in one piece, but each element has a
/// place of its own.
fn strided() -> Tensor {
    filled(&[3, 5], 0.0).transpose(0, 1).narrow(0, 0, 4)
}

type Call = fn(&ProcessGroup, &dyn Fn() -> Tensor) -> Result<Vec<Tensor>>;

/// Every call that writes to a tensor, with `output` for one that it writes to on this rank. On two ranks, of which
/// each gives its number and one more; it returns the outputs.
fn calls() -> Vec<(&'static str, Call)> {
    fn mine(group: &ProcessGroup) -> Tensor {
        filled(&[4, 3], group.rank() as f64 + 1.0)
    }
    fn set(mut output: Tensor, group: &ProcessGroup) -> Tensor {
        drop(output.f_copy_(&mine(group))); // not into one that overlaps itself
        output
    }
    vec![
        ("all_reduce", |group, output| {
            let mut tensor = set(output(), group);
            group.all_reduce(&mut tensor, ReduceOp::Sum)?;
            Ok(vec![tensor])
        }),
        ("reduce", |group, output| {
            let mut tensor = if group.rank() == 1 { set(output(), group) } else { mine(group) };
            group.reduce(&mut tensor, 1, ReduceOp::Sum)?;
            Ok(vec![tensor])
        }),
        ("broadcast", |group, output| {
            let mut tensor = if group.rank() == 1 { output() } else { mine(group) };
            group.broadcast(&mut tensor, 0)?;
            Ok(vec![tensor])
        }),
        ("all_gather", |group, output| {
            let mut list = [mine(group), output()];
            group.all_gather(&mut list, &mine(group))?;
            Ok(list.into())
        }),
        ("all_gather", |group, output| {
            // The list in one tensor: two rows for each rank.
            let mut all = output();
            group.all_gather_single(&mut all, &mine(group).narrow(0, 0, 2))?;
            Ok(vec![all])
        }),
        ("gather", |group, output| {
            let mut list = [output(), mine(group)];
            let list = &mut list[..];
            group.gather(&mine(group), (group.rank() == 1).then_some(&mut *list), 1)?;
            Ok(list.iter().map(Tensor::shallow_clone).collect())
        }),
        ("scatter", |group, output| {
            let mut tensor = output();
            let list = [filled(&[4, 3], 5.0), filled(&[4, 3], 6.0)];
            group.scatter(&mut tensor, (group.rank() == 0).then_some(&list[..]), 0)?;
            Ok(vec![tensor])
        }),
        ("reduce_scatter", |group, output| {
            let mut tensor = output();
            group.reduce_scatter(&mut tensor, &[mine(group), mine(group)], ReduceOp::Sum)?;
            Ok(vec![tensor])
        }),
        ("reduce_scatter", |group, output| {
            let mut tensor = output();
            let input = Tensor::cat(&[mine(group), mine(group)], 0);
            group.reduce_scatter_single(&mut tensor, &input, ReduceOp::Sum)?;
            Ok(vec![tensor])
        }),
        ("all_to_all", |group, output| {
            let mut list = [mine(group), output()];
            group.all_to_all(&mut list, &[mine(group), mine(group)])?;
            Ok(list.into())
        }),
        ("all_to_all", |group, output| {
            let mut tensor = output();
            group.all_to_all_single(&mut tensor, &mine(group), None, None)?;
            Ok(vec![tensor])
        }),
        ("recv", |group, output| {
            let mut tensor = output();
            if group.rank() == 0 {
                group.send(&mine(group), 1, 0)?;
            } else {
                group.recv(&mut tensor, Some(0), 0)?;
            }
            Ok(vec![tensor])
        }),
        ("recv", |group, output| {
            let mut tensor = output();
            let work = if group.rank() == 0 {
                group.isend(&mine(group), 1, 0)?
            } else {
                group.irecv(&mut tensor, Some(0), 0)?
            };
            work.wait()?;
            Ok(vec![tensor])
        }),
        ("recv", |group, output| {
            let (mut tensor, peer) = (output(), 1 - group.rank());
            let ops =
                [P2POp::irecv(&mut tensor, Some(peer), 0), P2POp::isend(&mine(group), peer, 0)];
            group.batch_isend_irecv(&ops)?.into_iter().try_for_each(|work| work.wait())?;
            Ok(vec![tensor])
        }),
    ]
}

#[test]
fn output_with_overlapping_elements_is_refused_at_once() {
    for (name, call) in calls() {
        ranks(2, move |rank, group| {
            // Rank 1 alone calls it: it is refused all the same, and can be called again as it should be.
            if rank.rank() == 1 {
                let error = call(&group, &expanded).unwrap_err().to_string();
                let expected = format!(
                    "{name}: the output of rank 1 has shape [4, 3] and strides [0, 1], so several elements may share \
                     memory and cannot hold different results; pass a tensor with memory of its own, such as \
                     `tensor.contiguous()`"
                );
                assert_eq!(error, expected);
            }
            let all = call(&group, &|| filled(&[4, 3], 0.0))?;
            let strided = call(&group, &strided)?;
            assert_eq!(all.len(), strided.len());
            for (all, strided) in all.iter().zip(&strided) {
                assert!(all.equal(strided), "{name}: {strided:?} is not {all:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn input_may_have_overlapping_elements() {
    ranks(2, |rank, group| {
        let input = filled(&[1, 3], rank.rank() as f64 + 1.0).expand([4, 3], false);
        let mut list = [filled(&[4, 3], 0.0), filled(&[4, 3], 0.0)];
        group.all_gather(&mut list, &input)?;
        assert!(list[1].equal(&filled(&[4, 3], 2.0)));
        if rank.rank() == 0 {
            group.send(&input, 1, 0)?;
            group.broadcast(&mut input.shallow_clone(), 0)?;
            group.reduce(&mut input.shallow_clone(), 1, ReduceOp::Sum)?;
        } else {
            let mut received = filled(&[4, 3], 0.0);
            group.recv(&mut received, Some(0), 0)?;
            group.broadcast(&mut received, 0)?;
            group.reduce(&mut received, 1, ReduceOp::Sum)?;
            assert!(received.equal(&filled(&[4, 3], 2.0)));
        }
        Ok(())
    });
}
