//! Sub-groups: groups of some of the ranks.

use std::sync::Arc;

use super::call::{Call, Options, refuse};
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
        self.collective(operation, Options::default(), &shape, &[], &[])?;

        let group = match ranks.binary_search(&self.rank) {
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
        let members: Arc<[usize]> = ranks.iter().map(|&rank| self.shared.members[rank]).collect();
        let here = ranks.iter().filter(|rank| self.shared.here.contains(rank)).count();
        let rank = self.global_rank();
        let connect = || match &self.network {
            Some(network) if here < ranks.len() => {
                let name = format!("group/{sequence}");
                let connect = |members| network.subgroup(ranks, &name, members);
                Bootstrap::between_processes(self.backend, self.run(), members, connect)
            }
            _ => Bootstrap::within_process(self.backend_here(), self.run(), members),
        };
        let bootstrap = self.sub_groups.fetch(sequence, here, self.run(), rank, connect)?;
        let group = bootstrap.join(RankIdentity { rank: rank_there, ..self.identity() })?;
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
        let mine = self.rank / group_size;
        self.make_groups(all.chunks(group_size), mine)?.ok_or_else(|| {
            Error::unsupported(format!("new_group made no group for rank {}", self.rank))
        })
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
        let mine = list_of[self.rank].unwrap_or(ranks_per_subgroup_list.len());
        self.make_groups(ranks_per_subgroup_list.iter().copied(), mine)
    }

    /// Creates a group of the ranks of each process. Returns that of this rank's process.
    #[track_caller]
    pub(crate) fn new_local_group(&self) -> Result<ProcessGroup> {
        let starts: Vec<usize> = self.all_gather_object(&self.shared.here.start)?;
        let mut lists: Vec<Vec<usize>> = Vec::new();
        for (rank, start) in starts.iter().enumerate() {
            match lists.last_mut() {
                Some(list) if list[0] == *start => list.push(rank),
                _ => lists.push(vec![rank]),
            }
        }
        let mine = lists.iter().position(|list| list.contains(&self.rank)).unwrap_or(lists.len());
        self.make_groups(lists.iter().map(Vec::as_slice), mine)?.ok_or_else(|| {
            Error::unsupported(format!("new_group made no group for rank {}", self.rank))
        })
    }

    /// Creates a group for each list of ranks. Returns the group of the list with index `mine`; `None` if there is no
    /// such list.
    #[track_caller]
    fn make_groups<'a>(
        &self,
        lists: impl Iterator<Item = &'a [usize]>,
        mine: usize,
    ) -> Result<Option<ProcessGroup>> {
        let mut found = None;
        for (index, ranks) in lists.enumerate() {
            let group = self.new_group(ranks)?;
            if index == mine {
                found = group;
            }
        }
        Ok(found)
    }

    /// Returns the members of this group in order, by their numbers in the group that
    /// [`Rank::init_process_group`](crate::launch::Rank::init_process_group) returned. Not a collective.
    ///
    /// Follows `torch.distributed.get_process_group_ranks`.
    pub fn ranks(&self) -> &[usize] {
        &self.shared.members
    }

    /// Returns the backend of a sub-group whose members are all in this process.
    fn backend_here(&self) -> Backend {
        if self.backend.works_within_process() {
            self.backend
        } else {
            Backend::for_threads(&[self.device])
        }
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
