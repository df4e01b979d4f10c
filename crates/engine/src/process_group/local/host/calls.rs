//! What a rank announces to other processes of its host, and reads of them.

use std::slice;
use std::sync::Arc;

use tch::Tensor;

use super::super::barrier::RankState;
use super::super::conflict::TensorMemory;
use super::super::exchange::ExchangeSlot;
use super::super::fingerprint::CollectiveFingerprint;
use super::super::input_copies::MAX_BYTES;
use super::super::mismatch::{mismatch_in_store, to_text};
use super::Allocation;
use super::group::{HostGroup, HostNumbers, STAGING};
use crate::error::{Error, Result};
use crate::operation::Operand;
use crate::process_group::call::Call;
use crate::process_group::dtype::num_bytes;
use crate::runtime::StopMessage;

/// What a rank announces to other processes, ahead of the offsets of its tensors.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Announcement {
    sequence: u64,
    /// The hash of what must be equal on all ranks.
    fingerprint: u64,
    stop: [u64; 3],
    inputs: usize,
    outputs: usize,
    /// The size of the contents in bytes.
    contents: usize,
}

impl Announcement {
    /// Returns what a rank of `group` announces of its `call`, which is `mine`.
    fn of(group: &HostGroup, call: &Call, fingerprint: u64, mine: &CollectiveFingerprint) -> Self {
        let stop = group.stop.get().map(|stop| stop.message()).unwrap_or_default();
        Self {
            sequence: call.sequence,
            fingerprint,
            stop: stop.to_numbers(),
            inputs: mine.inputs.len(),
            outputs: mine.outputs.len(),
            contents: mine.contents_len(),
        }
    }
}

/// Where a tensor is: its first byte in the memory of its rank's process, and its number of elements.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct TensorOffset {
    offset: usize,
    numel: usize,
}

/// The offset of a tensor that the other processes do not use.
const PRIVATE: usize = usize::MAX;

/// Tensors begin at cache lines, so that every dtype is aligned.
const LINE: usize = 64;

/// The layout of a rank's block: its state in the barrier, two announcements, numbers, and the room for tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    /// The number of tensors in a list.
    ranks: usize,
}

impl Cell {
    /// Returns the layout for groups of this many ranks.
    pub(super) fn of(ranks: usize) -> Self {
        Self { ranks }
    }

    fn offsets() -> usize {
        size_of::<Announcement>().next_multiple_of(LINE)
    }

    fn contents(self) -> usize {
        (Self::offsets() + 2 * self.ranks * size_of::<TensorOffset>()).next_multiple_of(LINE)
    }

    /// Returns how many inputs and outputs the group rank `rank` has in `call`.
    fn tensors(self, call: &Call, rank: usize) -> (usize, usize) {
        let Some(collective) = call.operation.collective() else { return (0, 0) };
        let count = |operand: Operand| {
            let is_held = operand.is_held_by(rank == call.root());
            if is_held { operand.tensors.count(self.ranks) } else { 0 }
        };
        (count(collective.inputs), count(collective.outputs))
    }

    /// Returns the offset of the announcement with this parity in a block.
    fn announcement(self, parity: usize) -> usize {
        let len = (self.contents() + MAX_BYTES).next_multiple_of(128);
        size_of::<RankState>().next_multiple_of(128) + parity * len
    }

    /// Returns the offset of [`HostNumbers`] in a block.
    pub(super) fn numbers(self) -> usize {
        self.announcement(2)
    }

    /// Returns the offset of the room for tensors in a block.
    pub(super) fn staging(self) -> usize {
        (self.numbers() + size_of::<HostNumbers>()).next_multiple_of(super::PAGE)
    }

    /// Returns the size of a block in bytes.
    pub(super) fn block_len(self) -> usize {
        self.staging() + STAGING
    }
}

/// The calls of all ranks of a host, as one rank announces and reads them.
pub(crate) struct HostCalls {
    rank: usize,
    pub group: Arc<HostGroup>,
    /// The calls of all ranks, with tensors that this process can reach.
    pub published: Vec<CollectiveFingerprint>,
    /// The hash of what must be equal on all ranks in this rank's last call.
    fingerprint: u64,
    /// The room for tensors that are too large for that of the block.
    room: Option<Allocation>,
}

impl HostCalls {
    pub(crate) fn new(rank: usize, group: Arc<HostGroup>) -> Self {
        let ranks = group.exchange.barrier().members().iter();
        let published = ranks.map(|_| CollectiveFingerprint::nothing()).collect();
        Self { rank, group, published, fingerprint: 0, room: None }
    }

    /// Returns the number of elements of each tensor that one exchange of `call` can move, and the most elements that any
    /// tensor has; `None` if it moves all. If each pair of ranks has its own size, the ranks have exchanged theirs.
    pub(crate) fn pieces(&self, call: &Call) -> Option<(usize, usize)> {
        let collective = call.operation.collective()?;
        let numel = if call.operation.has_own_sizes() {
            self.published.iter().flat_map(|call| &call.inputs).map(|input| input.numel).max()
        } else {
            call.inputs.iter().chain(call.outputs).map(Tensor::numel).max()
        };
        let numel = numel.unwrap_or(0);
        let unit = num_bytes(call.kind, 1).max(1);
        let lists = if collective.inputs.is_list() { self.group.cell.ranks } else { 1 };
        // Pieces begin at cache lines.
        let most = (STAGING / lists / LINE * LINE / unit).max(1);
        (numel > most).then_some((most, numel))
    }

    /// Returns whether the tensors of `call` move through this memory. On several hosts, only those that are reduced do.
    fn moves(&self, call: &Call) -> bool {
        let reduces = call.operation.collective().is_some_and(|collective| collective.reduces);
        self.group.is_whole || reduces
    }

    /// Copies this rank's results from where the others have written them into its own tensors.
    pub(crate) fn take_results(&self, mine: &CollectiveFingerprint) {
        for (from, to) in self.published[self.rank].outputs.iter().zip(&mine.outputs) {
            if from.data != to.data {
                let size = num_bytes(mine.kind, to.numel);
                // SAFETY: both have this many bytes: the room for tensors of this rank, and its own tensor.
                unsafe { from.data.copy_to_nonoverlapping(to.data, size) };
            }
        }
    }

    /// Returns the offset of room for copies of the inputs of `mine` that are not in this process's memory. Their elements
    /// have `unit` bytes.
    fn room_for_copies(&mut self, mine: &CollectiveFingerprint, unit: usize) -> Result<usize> {
        let Self { rank, ref group, ref mut room, .. } = *self;
        // On one host a piece fits.
        if !group.is_whole {
            let lens = mine.inputs.iter().map(|input| (input.data, input.numel * unit));
            let copied = lens.filter(|&(data, len)| group.offset_of(data, len).is_none());
            let total: usize = copied.map(|(_, len)| len.next_multiple_of(LINE)).sum();
            if total > STAGING {
                return group.room(room, total);
            }
        }
        Ok(group.staging_offset(rank))
    }

    /// Writes this rank's announcement, `mine`, in the place with this `parity`. With `moves`, copies its tensors to where
    /// the others can reach them.
    pub(crate) fn announce(
        &mut self,
        call: &Call,
        mine: &CollectiveFingerprint,
        parity: usize,
        moves: bool,
    ) -> Result<()> {
        let shares = moves && self.moves(call) && !mine.has_contents;
        let unit = num_bytes(call.kind, 1);
        let mut free = if shares { self.room_for_copies(mine, unit)? } else { 0 };
        self.fingerprint = call.fingerprint();
        let Self { rank, ref group, ref mut published, fingerprint, .. } = *self;
        let cell = group.in_block(rank, group.cell.announcement(parity))?;
        let offsets = self::offsets(cell);
        let announcement = Announcement::of(group, call, fingerprint, mine);
        let reached = &mut published[rank];
        reached.inputs.clear();
        for (index, input) in mine.inputs.iter().enumerate() {
            let (memory, offset) = if shares {
                share(group, rank, *input, unit, &mut free)?
            } else {
                (*input, PRIVATE)
            };
            reached.inputs.push(memory);
            // SAFETY: the cell has room for two lists of tensors, and only this rank writes it now.
            unsafe { offsets.add(index).write(TensorOffset { offset, numel: input.numel }) };
        }
        if shares && group.writes_to_others(call) {
            reached.outputs = reached.inputs.iter().take(mine.outputs.len()).copied().collect();
        } else {
            reached.outputs.clone_from(&mine.outputs);
        }
        for (index, output) in mine.outputs.iter().enumerate() {
            let tensor = TensorOffset { offset: PRIVATE, numel: output.numel };
            // SAFETY: as above.
            unsafe { offsets.add(mine.inputs.len() + index).write(tensor) };
        }
        // SAFETY: the cell has room for the announcement and the contents, and only this rank writes it now: the others
        // have read what was there, because they have entered the exchange after that one.
        unsafe {
            cell.cast::<Announcement>().write(announcement);
            let to = cell.add(group.cell.contents());
            mine.contents(0).copy_to_nonoverlapping(to, announcement.contents);
        }
        Ok(())
    }

    /// Reads the announcements of all ranks in the place with this `parity`. `own` has those of this process.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if their calls differ.
    pub(crate) fn read(
        &mut self,
        call: &Call,
        own: &ExchangeSlot<CollectiveFingerprint>,
        parity: usize,
        moves: bool,
    ) -> Result<()> {
        let mine = own.announced();
        let is_read = moves && self.moves(call) && !mine.has_contents;
        let Self { rank, ref group, ref mut published, fingerprint, .. } = *self;
        let unit = num_bytes(call.kind, 1);
        // All tensors have as many elements, unless each pair of ranks has its own size.
        let numel = mine.inputs.first().or(mine.outputs.first()).map(|tensor| tensor.numel);
        let numel = numel.filter(|_| !call.operation.has_own_sizes());
        let own_contents = mine.contents_len();
        let mut different = Vec::new();
        for (other, theirs) in published.iter_mut().enumerate() {
            theirs.describe_like(mine);
            if group.here.contains(&other) {
                theirs.spans.clone_from(&own.published_by(other).spans);
            }
            if other == rank {
                if mine.has_contents {
                    // SAFETY: this rank's own contents, which it writes in an exchange only.
                    unsafe { theirs.set_contents(mine.contents(0), MAX_BYTES) };
                }
                continue;
            }
            let cell = group.in_block(other, group.cell.announcement(parity))?;
            // SAFETY: the rank has written its announcement before the barrier, and writes there again only once this rank
            // has entered the next exchange. Should it write earlier, only this copy is checked and used: the read is
            // volatile.
            let announcement = unsafe { cell.cast::<Announcement>().read_volatile() };
            let Announcement { sequence, stop, inputs, outputs, contents, .. } = announcement;
            if let Some(mine) = group.stop.get() {
                let message = StopMessage::from_numbers(stop).ok_or_else(invalid_data)?;
                mine.merge(group.has_rank_0(group.process_of(other)), message);
            }
            if (sequence, announcement.fingerprint) != (call.sequence, fingerprint) {
                different.push(other);
                continue;
            }
            // A peer may have written other counts by mistake.
            let tensors = group.cell.tensors(call, group.first + other);
            if (inputs, outputs) != tensors || contents != own_contents {
                return Err(invalid_data());
            }
            let announced = Announced { group, rank: other, cell, unit, numel };
            announced.read_tensors(call, tensors, is_read, theirs)?;
            // SAFETY: as above; the cell has this many bytes of contents.
            unsafe { theirs.set_contents(cell.add(group.cell.contents()), contents) };
        }
        if different.is_empty() { Ok(()) } else { Err(self.mismatch(call, mine, &different)?) }
    }

    /// Returns the error of ranks that have made other calls.
    fn mismatch(
        &self,
        call: &Call,
        mine: &CollectiveFingerprint,
        different: &[usize],
    ) -> Result<Error> {
        let text = to_text(std::iter::once(mine));
        let parts = self.group.exchange.barrier().members().iter().map(slice::from_ref);
        let is_different = |rank: usize| different.contains(&rank);
        mismatch_in_store(&self.group.store, call.sequence, self.rank, &text, parts, is_different)
    }
}

/// What another rank has announced before the barrier. It writes there again only once this rank has entered the next
/// exchange.
struct Announced<'a> {
    group: &'a HostGroup,
    rank: usize,
    cell: *mut u8,
    /// The size of an element in bytes.
    unit: usize,
    /// The number of elements of each tensor, if all have as many.
    numel: Option<usize>,
}

impl Announced<'_> {
    /// Reads where the rank's inputs and outputs are. `is_read` is whether others read the inputs.
    fn read_tensors(
        &self,
        call: &Call,
        (inputs, outputs): (usize, usize),
        is_read: bool,
        theirs: &mut CollectiveFingerprint,
    ) -> Result<()> {
        theirs.inputs.clear();
        theirs.outputs.clear();
        for index in 0..inputs {
            theirs.inputs.push(self.tensor(index, is_read)?);
        }
        for index in 0..outputs {
            let reduced = theirs.inputs.get(index).filter(|_| self.group.writes_to_others(call));
            let output = reduced.copied().map_or_else(|| self.tensor(inputs + index, false), Ok)?;
            theirs.outputs.push(output);
        }
        Ok(())
    }

    /// Returns the memory of the tensor at `index`. It is null for a tensor that no other rank reads.
    fn tensor(&self, index: usize, is_read: bool) -> Result<TensorMemory> {
        let Self { group, rank, cell, unit, numel } = *self;
        // SAFETY: the cell has this many offsets. Should the rank write them too early, only this copy is checked and
        // used: the read is volatile.
        let tensor = unsafe { offsets(cell).add(index).read_volatile() };
        let TensorOffset { offset, numel: theirs } = tensor;
        let is_aligned = offset == PRIVATE || offset.is_multiple_of(unit.max(1));
        let has_size = numel.is_none_or(|numel| numel == theirs);
        if !is_aligned || !has_size || theirs > isize::MAX as usize / 16 {
            return Err(invalid_data());
        }
        let data = match offset {
            PRIVATE if is_read => return Err(invalid_data()),
            PRIVATE => std::ptr::null_mut(),
            offset => group.address(group.process_of(rank), offset, unit * theirs)?,
        };
        Ok(TensorMemory { data, numel: theirs })
    }
}

/// Returns where the ranks of this process reach `input` of `rank`, and its offset for others: its own place if others can
/// reach it, or else that of a copy at `free`, which moves on.
fn share(
    group: &HostGroup,
    rank: usize,
    input: TensorMemory,
    unit: usize,
    free: &mut usize,
) -> Result<(TensorMemory, usize)> {
    let len = input.numel * unit;
    if let Some(offset) = group.offset_of(input.data, len) {
        return Ok((input, offset));
    }
    let offset = *free;
    let data = group.address(group.process_of(rank), offset, len)?;
    // SAFETY: the room for tensors has these bytes; the other ranks read and write them between the barriers of a call
    // only, and this rank is not in one.
    unsafe { input.data.copy_to_nonoverlapping(data, len) };
    *free += len.next_multiple_of(LINE);
    Ok((TensorMemory { data, numel: input.numel }, offset))
}

/// Returns the offsets of an announcement.
fn offsets(cell: *mut u8) -> *mut TensorOffset {
    cell.wrapping_add(Cell::offsets()).cast()
}

/// Returns the error of data that no rank writes.
pub(crate) fn invalid_data() -> Error {
    Error::data(
        "another process has written invalid data into the shared memory; start the same program in all processes"
            .into(),
    )
}
