//! Checks whether all ranks still hold the same parameters.

use tch::nn::ModuleT;
use tch::{Device, Kind, Tensor};

use super::Trainer;
use crate::ddp::{DistributedDataParallel, Strategy};
use crate::error::{Compared, Error, Result, Suspects};

impl<M: ModuleT> Trainer<M> {
    /// Compares the ranks' parameters after every `every` steps (at least 1), by a 64-bit hash of each parameter's
    /// values. `None` never compares. All ranks must pass the same value.
    ///
    /// # Errors
    /// [`Error::Input`] with [`DataParallel`](crate::DataParallel), where rank 0 alone has the parameters.
    pub fn check_replicas(self, every: Option<u64>) -> Result<Self> {
        if every.is_some() && matches!(self.ddp, Strategy::Dp(_)) {
            return Err(Error::Input(
                "replicas can be compared with DistributedDataParallel only: with DataParallel rank 0 alone has the \
                 parameters"
                    .into(),
            ));
        }
        Ok(Self { check_replicas: every.map(|it| it.max(1)), ..self })
    }

    /// Compares the parameters if a check is due after the step that has just ended. A collective in that case.
    ///
    /// # Errors
    /// [`Error::ReplicasDiverged`], on all ranks alike.
    pub(super) fn check_replicas_if_due(&self) -> Result<()> {
        let step = self.state.step;
        let (Some(every), Strategy::Ddp(ddp)) = (self.check_replicas, &self.ddp) else {
            return Ok(());
        };
        if !step.is_multiple_of(every) {
            return Ok(());
        }
        self.compare_replicas(ddp, false, Compared::AfterStep)
    }

    /// Compares the parameters before a checkpoint is saved, so that the newest one holds equal replicas. A collective.
    ///
    /// # Errors
    /// [`Error::ReplicasDiverged`], on all ranks alike.
    pub(super) fn check_replicas_to_save(&self) -> Result<()> {
        match &self.ddp {
            Strategy::Ddp(ddp) if ddp.group().world_size() > 1 => {
                self.compare_replicas(ddp, false, Compared::BeforeSave)
            }
            _ => Ok(()), // only one rank has the parameters
        }
    }

    /// Compares the parameters of all ranks, and with `buffers` their buffers too. A collective.
    ///
    /// # Errors
    /// [`Error::ReplicasDiverged`], on all ranks alike.
    pub(crate) fn compare_replicas(
        &self,
        ddp: &DistributedDataParallel<M>,
        buffers: bool,
        compared: Compared,
    ) -> Result<()> {
        let group = ddp.group();
        group.synchronize()?;
        let (names, mine): (Vec<String>, Vec<u64>) =
            ddp.tensor_hashes(buffers)?.into_iter().unzip();
        let torch = || Error::torch("comparing the parameters");
        let mine: Vec<i64> = mine.into_iter().map(u64::cast_signed).collect();
        let mine = Tensor::f_from_slice(&mine)
            .and_then(|it| it.f_to_device(group.device()))
            .map_err(torch())?;
        let all = [group.world_size() as i64, names.len() as i64];
        let mut all = Tensor::f_zeros(all, (Kind::Int64, group.device())).map_err(torch())?;
        group.all_gather_into_tensor(&mut all, &mine)?;
        group.synchronize()?;
        let all = all.f_to_device(Device::Cpu).and_then(|it| it.f_reshape([-1])).map_err(torch())?;
        let all = Vec::<i64>::try_from(all).map_err(torch())?;
        match difference(&all, &names, group.ranks()) {
            None => Ok(()),
            Some((parameter, others, suspects)) => {
                let step = self.state.step.saturating_sub(1);
                let parameter = parameter.clone();
                Err(Error::ReplicasDiverged { parameter, others, suspects, step, compared })
            }
        }
    }
}

/// Returns the first of `names` whose hashes differ between `ranks`, the number of others that differ, and the suspect
/// ranks. `None` if all are equal. `all` holds the hashes of one rank after those of another.
fn difference<'a>(
    all: &[i64],
    names: &'a [String],
    ranks: &[usize],
) -> Option<(&'a String, usize, Suspects)> {
    let of_ranks: Vec<&[i64]> = all.chunks_exact(names.len().max(1)).collect();
    let differs = |at: &usize| of_ranks.iter().any(|it| it[*at] != of_ranks[0][*at]);
    let differing: Vec<usize> = (0..names.len()).filter(differs).collect();
    let first = *differing.first()?;
    let answers: Vec<(usize, i64)> =
        ranks.iter().zip(&of_ranks).map(|(&rank, it)| (rank, it[first])).collect();
    Some((&names[first], differing.len() - 1, Suspects::of(&answers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_differs_is_named_with_the_ranks_that_may_be_wrong() {
        let names = ["a", "b", "c"].map(String::from);
        let found = |all: &[i64], ranks: &[usize]| {
            let count = all.len() / ranks.len().max(1);
            let found = difference(all, &names[..count], ranks);
            found.map(|(name, others, it)| (name.clone(), others, it.ranks, it.has_majority))
        };
        let expected = |name: &str, others, ranks: &[usize], has_majority| {
            Some((name.to_string(), others, ranks.to_vec(), has_majority))
        };
        assert_eq!(found(&[1, 2, 3, 1, 2, 3], &[0, 1]), None);
        assert_eq!(found(&[], &[]), None);
        assert_eq!(found(&[1, 2], &[0]), None);
        assert_eq!(found(&[1, 2, 3, 1, 9, 9], &[0, 1]), expected("b", 1, &[0, 1], false));
        assert_eq!(found(&[9, 2, 1, 2, 1, 2], &[0, 1, 2]), expected("a", 0, &[0], true));
        let of_four = [1, 2, 1, 9, 1, 2, 1, 2];
        assert_eq!(found(&of_four, &[4, 5, 6, 7]), expected("b", 0, &[5], true));
    }
}
