//! The blocks of a group's ranks in the memory of a host.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use super::super::barrier::{Barrier, InMemory, RankState};
use super::super::exchange::Exchange;
use super::super::fingerprint::CollectiveFingerprint;
use super::calls::Cell;
use super::{Allocation, Host, used_up};
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::ffi::store::Gathered;
use crate::operation::Operation;
use crate::process_group::call::Call;
use crate::process_group::network::ProcessMap;
use crate::runtime::{LossRecord, RunContext, StopRequest};

/// The room for tensors of each rank, in bytes. Larger ones go through it in pieces.
pub(super) const STAGING: usize = 1 << 20;

/// The ranks of a group that are on one host. `rank` here is the index among them.
pub(crate) struct HostGroup {
    pub(super) host: Arc<Host>,
    /// The ranks of this process, at the barrier of all ranks of the host.
    pub(crate) exchange: Arc<Exchange<CollectiveFingerprint>>,
    /// The block of each rank.
    blocks: Box<[Block]>,
    pub(super) cell: Cell,
    /// A store of these ranks, through which they exchange texts of calls that differ.
    pub(super) store: TcpStore,
    /// Rank 0's decision to stop, which every announcement carries.
    pub(super) stop: Arc<OnceLock<Arc<StopRequest>>>,
    /// The group rank of the first one, and whether these are all of the group.
    pub(crate) first: usize,
    pub(super) is_whole: bool,
    /// The ranks of this process.
    pub(super) here: Range<usize>,
    /// The memory of this process's blocks.
    _own: Vec<Allocation>,
}

/// Numbers in the block of a rank. Only the first rank of a host uses `stop` and `offsets`. Memory of zeros is a valid
/// one.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct HostNumbers {
    /// Rank 0's decision to stop.
    pub stop: [AtomicU64; 3],
    /// The offsets of the send buffer and the receive buffer in the memory of the host's first process.
    pub offsets: [AtomicU64; 2],
    /// The losses of this block's rank.
    losses: LossRecord,
}

/// Where a rank's block is: the process whose memory it is in, and its first byte.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub process: usize,
    pub offset: usize,
}

impl HostGroup {
    /// Creates the blocks of this process's ranks, and finds those of the others on `host`. `members` are ranks of `run`,
    /// in the processes of `map`, each of which must call this. Returns the map of the hosts, and the group on this one;
    /// without a group if all ranks on this host are in this process. `None` if the memory of a process is used up.
    ///
    /// # Errors
    /// The errors of the store.
    pub(crate) fn join(
        host: &Arc<Host>,
        store: &TcpStore,
        run: &Arc<RunContext>,
        members: &Arc<[usize]>,
        map: &ProcessMap,
        stop: Arc<OnceLock<Arc<StopRequest>>>,
    ) -> Result<Option<(ProcessMap, Option<Self>)>> {
        let hosts = map.by_host(|rank| host.host_of(members[rank]));
        if hosts.len() == map.len() {
            return Ok(Some((hosts, None)));
        }
        let cell = Cell::of(members.len());
        let is_shared = hosts.here() != map.here();
        let in_blocks = if is_shared { map.here() } else { 0..0 };
        // A rank that has ended is still read by those that look whether it has arrived.
        let own: Option<Vec<Allocation>> =
            in_blocks.map(|_| host.allocate(cell.block_len(), cell.staging())).collect();
        let all = exchange_offsets(store, run, members, map, own.as_deref())?;
        let Some(all) = all else { return Ok(None) };
        let Some(own) = own.filter(|_| is_shared) else { return Ok(Some((hosts, None))) };
        let mut blocks = Vec::new();
        for (offsets, ranks) in all.iter().zip(&map.processes) {
            if hosts.here().contains(&ranks.start) {
                blocks.extend(find_blocks(host, &cell, offsets, &members[ranks.clone()])?);
            }
        }
        let states = find_states(host, &blocks)?;
        let first = hosts.here().start;
        let here = map.here().start - first..map.here().end - first;
        let barrier = Barrier::of(states, host.cores, run.clone(), members[hosts.here()].into());
        let exchange = Exchange::new(barrier, here.clone(), CollectiveFingerprint::nothing);
        let group = Self {
            exchange: Arc::new(exchange),
            host: host.clone(),
            blocks: blocks.into(),
            cell,
            store: store.under(&format!("host/{}", hosts.mine)),
            stop,
            first,
            is_whole: hosts.len() == 1,
            here,
            _own: own,
        };
        Ok(Some((hosts, Some(group))))
    }

    /// Returns the numbers in the block of `rank`, which all ranks of the host see, and which are zeros at first.
    ///
    /// # Errors
    /// As [`Self::address`].
    pub(crate) fn numbers(&self, rank: usize) -> Result<InMemory<HostNumbers>> {
        let pointer = NonNull::new(self.in_block(rank, self.cell.numbers())?.cast::<HostNumbers>());
        let pointer = pointer.ok_or_else(not_a_block)?;
        // SAFETY: the block has zeros there at first, and its memory exists as long as the host.
        Ok(unsafe { InMemory::at(pointer, self.host.clone()) })
    }

    /// Returns where the group rank `rank` records its losses; `None` if it is on another host.
    ///
    /// # Errors
    /// As [`Self::address`].
    pub(crate) fn losses(&self, rank: usize) -> Result<Option<InMemory<LossRecord>>> {
        if !(self.first..self.first + self.blocks.len()).contains(&rank) {
            return Ok(None);
        }
        let record = NonNull::from(&self.numbers(rank - self.first)?.losses);
        // SAFETY: the numbers have a valid record, and their memory exists as long as the host.
        Ok(Some(unsafe { InMemory::at(record, self.host.clone()) }))
    }

    /// Returns whether this process has the first rank of the host.
    pub(crate) fn has_first(&self) -> bool {
        self.here.start == 0
    }

    /// Returns the address of a buffer of the process that has the first rank.
    ///
    /// # Errors
    /// As [`Self::address`].
    pub(crate) fn buffer_of_first(&self, offset: usize, len: usize) -> Result<*mut u8> {
        self.address(self.process_of(0), offset, len)
    }

    /// Returns the host, for tensors in its memory.
    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Returns the address of the byte `offset` in the block of `rank`.
    pub(super) fn in_block(&self, rank: usize, offset: usize) -> Result<*mut u8> {
        let Block { process, offset: start } = self.blocks[rank];
        self.address(process, start + offset, 1)
    }

    /// Returns the address of `len` bytes in the memory of `process`.
    ///
    /// # Errors
    /// [`Error::Input`] if the memory has no such bytes: another process has written an invalid offset.
    pub(super) fn address(&self, process: usize, offset: usize, len: usize) -> Result<*mut u8> {
        self.host.regions[process].at(offset, len).ok_or_else(not_a_block)
    }

    /// Returns the process of `rank`.
    pub(super) fn process_of(&self, rank: usize) -> usize {
        self.blocks[rank].process
    }

    /// Returns the offset of a tensor in this process's memory; `None` if it is elsewhere.
    pub(crate) fn offset_of(&self, data: *const u8, len: usize) -> Option<usize> {
        self.host.regions[self.host.mine].offset_of(data, len)
    }

    /// Returns whether `process` has the group rank 0.
    pub(super) fn has_rank_0(&self, process: usize) -> bool {
        self.first == 0 && process == self.process_of(0)
    }

    /// Returns whether ranks write results of `call` into the tensors of others. Otherwise each writes its own.
    pub(super) fn writes_to_others(&self, call: &Call) -> bool {
        self.is_whole && matches!(call.operation, Operation::AllReduce | Operation::Reduce)
    }

    /// Returns the offset of `room`, which gets at least this many bytes.
    ///
    /// # Errors
    /// [`Error::Input`] if the memory of this process is used up.
    pub(super) fn room(&self, room: &mut Option<Allocation>, bytes: usize) -> Result<usize> {
        if room.as_ref().is_none_or(|room| room.range.len() < bytes) {
            *room = None;
            *room = self.host.allocate(bytes.next_power_of_two(), 0);
        }
        room.as_ref().map(|room| room.range.start).ok_or_else(used_up)
    }

    /// Returns the offset of the room for tensors of `rank`, in the memory of its process.
    pub(super) fn staging_offset(&self, rank: usize) -> usize {
        self.blocks[rank].offset + self.cell.staging()
    }
}

/// Exchanges the offsets of each process's blocks, `own` of this one. `None` if the memory of a process is used up.
fn exchange_offsets(
    store: &TcpStore,
    run: &RunContext,
    members: &[usize],
    map: &ProcessMap,
    own: Option<&[Allocation]>,
) -> Result<Option<Vec<Vec<usize>>>> {
    let offset = |block: &Allocation| block.range.start;
    let offsets = own.map(|own| own.iter().map(offset).collect::<Vec<_>>());
    let absent = |missing: Vec<usize>| {
        let ranks = missing.iter().flat_map(|it| &members[map.processes[*it].clone()]);
        run.timeout_error(members[map.here().start], ranks.copied().collect())
    };
    let process = [map.mine, map.len()];
    let all: Vec<Option<Vec<usize>>> =
        Gathered::of(store, "memory", process, &offsets, run.timeout, absent, Gathered::All)?;
    Ok(all.into_iter().collect())
}

/// Returns the states in the barrier of the ranks that have these `blocks`.
fn find_states(host: &Arc<Host>, blocks: &[Block]) -> Result<Box<[InMemory<RankState>]>> {
    let state = |block: &Block| {
        let pointer = host.regions[block.process].at(block.offset, size_of::<RankState>())?;
        let pointer = NonNull::new(pointer.cast::<RankState>())?;
        let memory: Arc<dyn Any + Send + Sync> = host.clone();
        // SAFETY: the block begins with a rank's state, which was zeros at first, and its memory exists as long as
        // the host.
        Some(unsafe { InMemory::at(pointer, memory) })
    };
    blocks.iter().map(state).collect::<Option<_>>().ok_or_else(not_a_block)
}

/// Returns the blocks of the ranks `members`, which are of one process, at its `offsets`.
fn find_blocks(
    host: &Host,
    cell: &Cell,
    offsets: &[usize],
    members: &[usize],
) -> Result<Vec<Block>> {
    let block = |(&rank, &offset): (&usize, &usize)| {
        let process = host.process_of(rank)?;
        let is_inside = host.regions[process].at(offset, cell.block_len()).is_some();
        (is_inside && offset.is_multiple_of(super::PAGE)).then_some(Block { process, offset })
    };
    let blocks = members.iter().zip(offsets).map(block).collect::<Option<Vec<_>>>();
    blocks.filter(|_| offsets.len() == members.len()).ok_or_else(not_a_block)
}

fn not_a_block() -> Error {
    Error::data(
        "another process names shared memory that does not exist; another program may use the same store: give each \
         run a store of its own"
            .into(),
    )
}
