//! Replica checks: whether all ranks still hold the same parameters.

use anyhow::Result;

use crate::ddp::DistributedDataParallel;
use crate::error::{Compared, Error, Suspects};
use crate::trainer::{Callback, Step, TrainContext};

/// Compares the parameters of all ranks every few steps.
#[derive(Debug)]
pub(in crate::trainer) struct ReplicaCheck {
    /// Steps between checks.
    pub every: u64,
}

impl<M> Callback<M> for ReplicaCheck {
    /// Compares the parameters if a check is due: a collective in that case.
    fn on_step_end(&mut self, context: &mut TrainContext<M>, _: &Step) -> Result<()> {
        let steps = context.state.step;
        if steps.is_multiple_of(self.every) {
            compare_replicas(&context.ddp, false, steps, Compared::AfterStep)?;
        }
        Ok(())
    }
}

/// Compares the parameters of all ranks after `steps` steps, and with `buffers` their buffers too, by a 64-bit hash of
/// each tensor. A collective.
///
/// # Errors
/// [`Error::ReplicasDiverged`], on all ranks alike.
#[doc(hidden)]
pub fn compare_replicas<M>(
    ddp: &DistributedDataParallel<M>,
    buffers: bool,
    steps: u64,
    compared: Compared,
) -> crate::error::Result<()> {
    let group = ddp.group();
    group.synchronize()?;
    let (names, hashes): (Vec<String>, Vec<u64>) = ddp.tensor_hashes(buffers)?.into_iter().unzip();
    let all = group.all_gather_object(&hashes)?;
    let Some((parameter, others, suspects)) = difference(&all, &names, group.ranks()) else {
        return Ok(());
    };
    let (parameter, step) = (parameter.clone(), steps.saturating_sub(1));
    Err(Error::ReplicasDiverged { parameter, others, suspects, step, compared })
}

/// Returns the first of `names` whose hashes differ between `ranks`, the number of others that differ, and the suspect
/// ranks. `None` if all are equal. `all` holds the hashes of each rank.
fn difference<'a>(
    all: &[Vec<u64>],
    names: &'a [String],
    ranks: &[usize],
) -> Option<(&'a String, usize, Suspects)> {
    let differs = |index: &usize| all.iter().any(|row| row.get(*index) != all[0].get(*index));
    let differing: Vec<usize> = (0..names.len()).filter(differs).collect();
    let first = *differing.first()?;
    let answers: Vec<_> =
        ranks.iter().zip(all).map(|(&rank, row)| (rank, row.get(first))).collect();
    Some((&names[first], differing.len() - 1, Suspects::of(&answers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_different_parameter_is_named_with_its_suspects() {
        let names = ["a", "b", "c"].map(String::from);
        let found = |all: &[u64], ranks: &[usize]| {
            let count = all.len() / ranks.len().max(1);
            let all: Vec<Vec<u64>> = all.chunks_exact(count.max(1)).map(<[u64]>::to_vec).collect();
            let found = difference(&all, &names[..count], ranks);
            found.map(|(name, others, suspects)| {
                (name.clone(), others, suspects.ranks, suspects.has_majority)
            })
        };
        let expected = |name: &str, others, ranks: &[usize], has_majority| {
            Some((name.to_string(), others, ranks.to_vec(), has_majority))
        };
        assert_eq!(found(&[1, 2, 3, 1, 2, 3], &[0, 1]), None);
        assert_eq!(found(&[], &[]), None);
        assert_eq!(found(&[1, 2], &[0]), None);
        assert_eq!(found(&[1, 2, 3, 1, 9, 9], &[0, 1]), expected("b", 1, &[0, 1], false));
        assert_eq!(found(&[9, 2, 1, 2, 1, 2], &[0, 1, 2]), expected("a", 0, &[0], true));
        let four_ranks = [1, 2, 1, 9, 1, 2, 1, 2];
        assert_eq!(found(&four_ranks, &[4, 5, 6, 7]), expected("b", 0, &[5], true));
    }
}
