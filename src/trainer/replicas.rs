//! Whether all ranks still hold the same parameters.

use tch::nn::ModuleT;
use tch::{Device, Kind, Tensor};

use super::Trainer;
use crate::ddp::Strategy;
use crate::error::{Error, Result};

impl<M: ModuleT> Trainer<M> {
    /// Compares after every so many steps, at least one, what each rank has for each parameter, by 64 bits over its
    /// values. All ranks must ask for the same.
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

    /// Compares, if it is time to after the step that has just ended. A collective then.
    ///
    /// # Errors
    /// [`Error::Replicas`], on all ranks alike.
    pub(super) fn check_replicas_if_due(&self) -> Result<()> {
        let step = self.state.step;
        let (Some(every), Strategy::Ddp(ddp)) = (self.check_replicas, &self.ddp) else {
            return Ok(());
        };
        if !step.is_multiple_of(every) {
            return Ok(());
        }
        let group = ddp.group();
        group.synchronize()?;
        let (names, mine): (Vec<String>, Vec<u64>) = ddp.parameter_hashes()?.into_iter().unzip();
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
        match odd_one(&all, names.len()) {
            None => Ok(()),
            Some(Odd { rank, parameter, count }) => Err(Error::Replicas {
                parameter: names[parameter].clone(),
                others: count - 1,
                rank: group.ranks()[rank],
                step: step - 1,
            }),
        }
    }
}

/// A rank whose parameters are not those of the others.
#[derive(Debug, PartialEq, Eq)]
struct Odd {
    rank: usize,
    /// The first that differs.
    parameter: usize,
    /// How many differ on any rank.
    count: usize,
}

/// Looks at the hashes of all ranks, `parameters` of each. The odd one has what the fewest have; of two the later.
fn odd_one(all: &[i64], parameters: usize) -> Option<Odd> {
    let ranks: Vec<&[i64]> = all.chunks_exact(parameters.max(1)).collect();
    let differs = |parameter: &usize| ranks.iter().any(|it| it[*parameter] != ranks[0][*parameter]);
    let differing: Vec<usize> = (0..parameters).filter(differs).collect();
    let parameter = *differing.first()?;
    let of = |rank: usize| ranks[rank][parameter];
    let same = |rank: &usize| ranks.iter().filter(|it| it[parameter] == of(*rank)).count();
    let rank = (0..ranks.len()).rev().min_by_key(same)?;
    Some(Odd { rank, parameter, count: differing.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_one_is_the_one_that_the_others_do_not_agree_with() {
        let odd = |all: &[i64], parameters| odd_one(all, parameters);
        assert_eq!(odd(&[1, 2, 3, 1, 2, 3], 3), None);
        assert_eq!(odd(&[], 0), None);
        assert_eq!(odd(&[1, 2], 2), None);
        let found = |rank, parameter, count| Some(Odd { rank, parameter, count });
        assert_eq!(odd(&[1, 2, 3, 1, 9, 9], 3), found(1, 1, 2));
        assert_eq!(odd(&[9, 2, 1, 2, 1, 2], 2), found(0, 0, 1));
        assert_eq!(odd(&[1, 2, 1, 9, 1, 2, 1, 2], 2), found(1, 1, 1));
    }
}
