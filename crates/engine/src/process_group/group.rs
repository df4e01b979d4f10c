//! Sub-groups: groups of some of the ranks.

use std::sync::Arc;

use super::call::{Call, refuse};
use super::{Backend, Bootstrap, ProcessGroup, RankIdentity};
use crate::error::{Error, Result};
use crate::operation::Operation;

impl ProcessGroup {
    /// Creates a group of some ranks of this one, numbered from 0 in the same order. Returns `None` on ranks
    /// outside the new group. Every rank of this group must call it, member or not.
    ///
    /// Follows `torch.distributed.new_group`. `ranks` are ranks of this group, in any order. In the new group,
    /// every rank (`src`, `dst`, [`ProcessGroup::rank`]) is a rank of that group. PyTorch's `src` and
    /// `dst` are ranks of the whole world instead. [`ProcessGroup::ranks`] translates. Different groups can run
    /// operations at the same time. Ranks that are in several groups must call their collectives in one order.
    ///
    /// # Errors
    /// [`Error::Input`] if `ranks` is empty, repeats a rank, or names a rank that does not exist; the errors of
    /// [`ProcessGroup::all_reduce`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(4, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let even = group.new_group(&[0, 2])?;
    ///     let odd = group.new_group(&[1, 3])?;
    ///     let mine = even.or(odd).expect("every rank is in one of them");
    ///     let mut tensor = Tensor::from_slice(&[rank.rank() as i64]);
    ///     mine.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ///     assert_eq!(tensor.int64_value(&[0]), [2, 4][rank.rank() % 2]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<ProcessGroup>> {
        let operation = Operation::NewGroup;
        let ranks = self.check_members(ranks)?;
        let shape: Vec<i64> = ranks.iter().map(|&rank| rank as i64).collect();
        let sequence = self.sequence()?;
        self.collective(Call { shape: &shape, ..Call::bare(operation) })?;

        let group = match ranks.binary_search(&self.rank()) {
            Ok(rank_there) => Some(self.join_sub_group(&ranks, rank_there, sequence)?),
            Err(_) => None,
        };
        if self.is_stream_ordered() {
            // Connecting allocates memory, which may wait until all GPUs are idle: no rank may launch meanwhile.
            self.side()?.backend.run(&Call { shape: &shape, ..Call::bare(operation) })?;
        }
        Ok(group)
    }

    /// Joins the group of `ranks` that the call `sequence` creates, as its rank `rank_there`.
    fn join_sub_group(
        &self,
        ranks: &[usize],
        rank_there: usize,
        sequence: u64,
    ) -> Result<ProcessGroup> {
        let members: Arc<[usize]> = ranks.iter().map(|&rank| self.ranks()[rank]).collect();
        let here = ranks.iter().filter(|rank| self.common.shared.here.contains(rank)).count();
        let rank = self.global_rank();
        let connect = || match &self.common.network {
            Some(network) if here < ranks.len() => {
                let name = format!("group/{sequence}");
                let connect = |members| network.subgroup(ranks, &name, members);
                Bootstrap::between_processes(self.common.backend, self.run(), members, connect)
            }
            _ => {
                let own = Some(self.common.backend).filter(|own| own.works_within_process());
                let backend = own.unwrap_or_else(|| Backend::for_threads(&[self.device()]));
                Bootstrap::within_process(backend, self.run(), members)
            }
        };
        let bootstrap = self.common.sub_groups.fetch(sequence, here, self.run(), rank, connect)?;
        let group = bootstrap.join(RankIdentity { rank: rank_there, ..self.identity.clone() })?;
        Ok(group.record_as_part_of(self, sequence))
    }

    /// Splits this group into groups of `group_size` consecutive ranks each: the first has the ranks below
    /// `group_size`. Returns the group that this rank is in.
    ///
    /// Follows `torch.distributed.new_subgroups`. Every rank must call it. Rank numbers are as in
    /// [`ProcessGroup::new_group`].
    ///
    /// # Errors
    /// [`Error::Input`] if the ranks cannot be split into groups of that size; the errors of
    /// [`ProcessGroup::all_reduce`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(4, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let pair = group.new_subgroups(2)?;
    ///     assert_eq!(pair.ranks(), [[0, 1], [2, 3]][rank.rank() / 2]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn new_subgroups(&self, group_size: usize) -> Result<ProcessGroup> {
        let count = self.world_size();
        if group_size == 0 || !count.is_multiple_of(group_size) {
            return refuse(
                Operation::NewGroup,
                format!("{count} ranks cannot be split into groups of {group_size}; use a divisor"),
            );
        }
        let all: Vec<usize> = (0..count).collect();
        self.group_of_mine(&all.chunks(group_size).collect::<Vec<_>>())
    }

    /// Creates a group for each list of ranks. Returns the group that this rank is in; `None` if it is in none.
    ///
    /// Follows `torch.distributed.new_subgroups_by_enumeration`. Every rank must call it, with the same lists. Rank
    /// numbers are as in [`ProcessGroup::new_group`].
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::new_group`]; [`Error::Input`] if a rank is in two lists.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(5, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mine = group.new_subgroups_by_enumeration(&[&[0, 2], &[1, 3]])?;
    ///     let ranks = mine.as_ref().map(|it| it.ranks());
    ///     assert_eq!(ranks, [Some(&[0, 2][..]), Some(&[1, 3]), None][[0, 1, 0, 1, 2][rank.rank()]]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn new_subgroups_by_enumeration(
        &self,
        ranks_per_subgroup_list: &[&[usize]],
    ) -> Result<Option<ProcessGroup>> {
        let mut list_of = vec![None; self.world_size()];
        for (list, ranks) in ranks_per_subgroup_list.iter().enumerate() {
            self.check_members(ranks)?;
            for &rank in *ranks {
                if let Some(other) = list_of[rank].replace(list) {
                    return refuse(
                        Operation::NewGroup,
                        format!("rank {rank} is in list {other} and in list {list}; name it once"),
                    );
                }
            }
        }
        let mut mine = None;
        for ranks in ranks_per_subgroup_list {
            mine = self.new_group(ranks)?.or(mine);
        }
        Ok(mine)
    }

    /// Creates a group of the ranks of each process. Returns that of this rank's process.
    #[track_caller]
    pub(crate) fn new_local_group(&self) -> Result<ProcessGroup> {
        let starts: Vec<usize> = self.all_gather_object(&self.common.shared.here.start)?;
        let all: Vec<usize> = (0..starts.len()).collect();
        self.group_of_mine(&all.chunk_by(|&a, &b| starts[a] == starts[b]).collect::<Vec<_>>())
    }

    /// Creates a group for each of `lists`, which name every rank. Returns the group of this rank.
    #[track_caller]
    fn group_of_mine(&self, lists: &[&[usize]]) -> Result<ProcessGroup> {
        self.new_subgroups_by_enumeration(lists)?.ok_or_else(|| {
            Error::unsupported(format!("new_group made no group for rank {}", self.rank()))
        })
    }

    /// Returns the members of this group in order, by their numbers in the group that
    /// [`Rank::init_process_group`](crate::launch::Rank::init_process_group) returned. Not a collective.
    ///
    /// Follows `torch.distributed.get_process_group_ranks`.
    pub fn ranks(&self) -> &[usize] {
        &self.common.shared.members
    }

    /// Returns the members of a new group in ascending order. Checks that all exist and are different.
    fn check_members(&self, ranks: &[usize]) -> Result<Vec<usize>> {
        let operation = Operation::NewGroup;
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        for &rank in &ranks {
            self.check_rank(operation, "a member", rank)?;
        }
        if ranks.is_empty() || ranks.windows(2).any(|pair| pair[0] == pair[1]) {
            return refuse(
                operation,
                format!(
                    "{ranks:?} is empty or names a rank twice; name one rank or more, each once"
                ),
            );
        }
        Ok(ranks)
    }
}
