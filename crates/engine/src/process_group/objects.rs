//! Collectives on Rust values instead of tensors: any type that serde can serialize and deserialize.
//!
//! All launched work is done when a call returns. The values are sent as MessagePack in byte tensors, in two collectives:
//! the length, then the bytes. Use them for occasional values; a tensor is faster. (MessagePack has a single nil: `Some(())`
//! and `Some(None)` come back as `None`.)

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;

use super::{ProcessGroup, ReduceOp};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;

impl ProcessGroup {
    /// Replaces every rank's list with rank `src`'s list.
    ///
    /// Follows `torch.distributed.broadcast_object_list`; here, the other ranks' lists may have any length before.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::broadcast`]; [`Error::Input`] if an object cannot be serialised, or is not
    /// of the type that this rank expects.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut list = if rank.rank() == 0 { vec![("lr".to_string(), 0.1)] } else { vec![] };
    ///     group.broadcast_object_list(&mut list, 0)?;
    ///     assert_eq!(list, [("lr".to_string(), 0.1)]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn broadcast_object_list<T: Serialize + DeserializeOwned>(
        &self,
        object_list: &mut Vec<T>,
        src: usize,
    ) -> Result<()> {
        const NAME: &str = "broadcast_object_list";
        let is_source = self.rank() == src;
        let bytes = if is_source { to_bytes(NAME, &*object_list)? } else { Vec::new() };
        let mut len = self.length_tensor(bytes.len())?;
        self.broadcast(&mut len, src)?;
        let bytes = self.broadcast_bytes(&bytes, self.read_length(NAME, &len)?, src)?;
        if !is_source {
            *object_list = from_bytes(NAME, &bytes)?;
        }
        Ok(())
    }

    /// Returns every rank's object, in rank order, on every rank.
    ///
    /// Follows `torch.distributed.all_gather_object`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::broadcast_object_list`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(3, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let names = group.all_gather_object(&format!("rank {}", rank.rank()))?;
    ///     assert_eq!(names, ["rank 0", "rank 1", "rank 2"]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        const NAME: &str = "all_gather_object";
        let bytes = to_bytes(NAME, object)?;
        let framed = self.framed(&bytes, self.longest(NAME, bytes.len())?)?;
        let mut all = self.room_for_all(&framed)?;
        self.all_gather_single(&mut all, &framed)?;
        self.objects(NAME, &all)
    }

    /// Returns every rank's object, in rank order, on rank `dst`; `None` on the other ranks.
    ///
    /// Follows `torch.distributed.gather_object`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::broadcast_object_list`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let squares = group.gather_object(&(rank.rank() * rank.rank()), 0)?;
    ///     assert_eq!(squares, (rank.rank() == 0).then(|| vec![0, 1]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        dst: usize,
    ) -> Result<Option<Vec<T>>> {
        const NAME: &str = "gather_object";
        let bytes = to_bytes(NAME, object)?;
        let framed = self.framed(&bytes, self.longest(NAME, bytes.len())?)?;
        if self.rank() != dst {
            self.gather(&framed, None, dst)?;
            return self.await_launched().map(|()| None);
        }
        let all = self.room_for_all(&framed)?;
        self.gather(&framed, Some(&mut all.unbind(0)), dst)?;
        self.objects(NAME, &all).map(Some)
    }

    /// Returns this rank's object from rank `src`'s list. Only rank `src` passes a list: one object for each rank.
    ///
    /// Follows `torch.distributed.scatter_object_list`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::broadcast_object_list`]; [`Error::Input`] if the list does not have one
    /// object for each rank, is missing on `src`, or is passed on another rank.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let list = (rank.rank() == 0).then(|| vec![Some("a".to_string()), None]);
    ///     let mine: Option<String> = group.scatter_object_list(list.as_deref(), 0)?;
    ///     assert_eq!(mine.as_deref(), [Some("a"), None][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn scatter_object_list<T: Serialize + DeserializeOwned>(
        &self,
        scatter_object_input_list: Option<&[T]>,
        src: usize,
    ) -> Result<T> {
        const NAME: &str = "scatter_object_list";
        let wrong = scatter_object_input_list.map(<[T]>::len)
            != (self.rank() == src).then_some(self.world_size());
        if wrong {
            return Err(Error::usage(format!(
                "{NAME}: rank {src} (src) alone passes a list, with an object for each of {} ranks; this is \
                 rank {}",
                self.world_size(),
                self.rank()
            )));
        }
        let list = scatter_object_input_list.unwrap_or_default();
        let list = list.iter().map(|object| to_bytes(NAME, object)).collect::<Result<Vec<_>>>()?;
        let longest = list.iter().map(Vec::len).max().unwrap_or(0);
        let longest = self.longest(NAME, longest)?;
        let frames = list.iter().map(|bytes| self.framed(bytes, longest));
        let frames = frames.collect::<Result<Vec<_>>>()?;
        let mut mine = self.framed(&[], longest)?;
        self.scatter(&mut mine, (self.rank() == src).then_some(&frames[..]), src)?;
        unframe(NAME, &self.bytes_of(&mine)?)
    }

    /// Sends a list to rank `dst`, which receives it with [`ProcessGroup::recv_object_list`].
    ///
    /// Follows `torch.distributed.send_object_list`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::send`] and [`ProcessGroup::broadcast_object_list`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     if rank.rank() == 0 {
    ///         group.send_object_list(&["hello", "world"], 1)?;
    ///     } else {
    ///         let words: Vec<String> = group.recv_object_list(0)?;
    ///         assert_eq!(words, ["hello", "world"]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn send_object_list<T: Serialize>(&self, object_list: &[T], dst: usize) -> Result<()> {
        let bytes = to_bytes("send_object_list", &object_list)?;
        self.send(&self.length_tensor(bytes.len())?, dst, OBJECTS)?;
        self.send(&self.tensor_of(&bytes, bytes.len())?, dst, OBJECTS)?;
        self.await_launched()
    }

    /// Receives the list that rank `src` sends with [`ProcessGroup::send_object_list`].
    ///
    /// Follows `torch.distributed.recv_object_list`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::send_object_list`], which has an example.
    #[track_caller]
    pub fn recv_object_list<T: DeserializeOwned>(&self, src: usize) -> Result<Vec<T>> {
        const NAME: &str = "recv_object_list";
        let mut len = self.length_tensor(0)?;
        self.recv(&mut len, Some(src), OBJECTS)?;
        let mut bytes = self.tensor_of(&[], self.read_length(NAME, &len)?)?;
        self.recv(&mut bytes, Some(src), OBJECTS)?;
        from_bytes(NAME, &self.bytes_of(&bytes)?)
    }

    /// Returns rank `src`'s `size` bytes, on every rank.
    #[track_caller]
    pub(crate) fn broadcast_bytes(&self, bytes: &[u8], size: usize, src: usize) -> Result<Vec<u8>> {
        let mine = if self.rank() == src { bytes } else { &[] };
        let mut tensor = self.tensor_of(mine, size)?;
        self.broadcast(&mut tensor, src)?;
        self.bytes_of(&tensor)
    }

    /// Returns the longest of all ranks' lengths.
    #[track_caller]
    fn longest(&self, name: &str, len: usize) -> Result<usize> {
        let mut longest = self.length_tensor(len)?;
        self.all_reduce(&mut longest, ReduceOp::Max)?;
        self.read_length(name, &longest)
    }

    /// Returns a frame with these bytes: their number in 8 bytes, the bytes, and zeros up to the length of the
    /// `longest`.
    fn framed(&self, bytes: &[u8], longest: usize) -> Result<Tensor> {
        let frame = [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
        self.tensor_of(&frame, LENGTH + longest)
    }

    /// Returns the objects in the frames of all ranks.
    fn objects<T: DeserializeOwned>(&self, name: &str, all: &Tensor) -> Result<Vec<T>> {
        let bytes = self.bytes_of(&all.reshape([-1]))?;
        bytes
            .chunks_exact(bytes.len() / self.world_size())
            .map(|frame| unframe(name, frame))
            .collect()
    }

    /// Copies bytes to this rank's device and pads them with zeros to `len`, which another rank may have announced.
    fn tensor_of(&self, bytes: &[u8], len: usize) -> Result<Tensor> {
        let mut padded = Vec::new();
        padded.try_reserve_exact(len).map_err(|error| {
            Error::unsupported(format!(
                "there is not enough memory for the {len} bytes that are announced: {error}"
            ))
        })?;
        padded.extend_from_slice(&bytes[..bytes.len().min(len)]);
        padded.resize(len, 0);
        self.to_device(&Tensor::from_slice(&padded))
    }

    /// Returns a length as a tensor on the rank's device.
    fn length_tensor(&self, len: usize) -> Result<Tensor> {
        self.to_device(&Tensor::from_slice(&[len as i64]))
    }

    /// Reads a length that another rank may have sent.
    fn read_length(&self, name: &str, len: &Tensor) -> Result<usize> {
        let len = self.to_host(len)?.f_int64_value(&[0]).doing("reading a length")?;
        length(name, len)
    }

    fn bytes_of(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        Vec::<u8>::try_from(self.to_host(tensor)?).doing("reading bytes")
    }
}

/// The tag of object messages between two ranks. No tensor's tag should be this one.
const OBJECTS: u64 = u64::MAX;

/// The size of a frame's header in bytes. The header is the length of the object.
const LENGTH: usize = size_of::<u64>();

/// Returns the object in a frame.
fn unframe<T: DeserializeOwned>(name: &str, frame: &[u8]) -> Result<T> {
    let len = frame.first_chunk().map_or(-1, |bytes| i64::from_le_bytes(*bytes));
    let len = length(name, len)?;
    let object = frame.get(LENGTH..LENGTH + len).ok_or_else(|| {
        Error::data(format!(
            "{name}: an object of {len} bytes is announced in a frame of {} bytes",
            frame.len()
        ))
    })?;
    from_bytes(name, object)
}

/// The maximum length of an object in bytes: each rank allocates the memory that another rank announces.
const MAX_OBJECT_BYTES: usize = i32::MAX as usize;

fn length(name: &str, len: i64) -> Result<usize> {
    usize::try_from(len).ok().filter(|len| *len <= MAX_OBJECT_BYTES).ok_or_else(|| {
        Error::data(format!(
            "{name}: an object has up to {MAX_OBJECT_BYTES} bytes, and {len} are announced"
        ))
    })
}

fn to_bytes(name: &str, object: &(impl Serialize + ?Sized)) -> Result<Vec<u8>> {
    let bytes = rmp_serde::to_vec_named(object).map_err(|error| {
        Error::usage(format!("{name}: the object cannot be serialised: {error}"))
    })?;
    length(name, bytes.len() as i64)?;
    Ok(bytes)
}

fn from_bytes<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).map_err(|error| {
        Error::mismatch(format!(
            "{name}: the received object is not of the type {}: {error}",
            std::any::type_name::<T>()
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;

    type Header = Vec<(PathBuf, String, [usize; 2])>;
    type Map = BTreeMap<String, Vec<Option<f64>>>;

    /// Reads `bytes` as objects of several types. Checks that each error names the call.
    fn read_all(bytes: &[u8]) {
        let refused = [
            from_bytes::<Header>("some_call", bytes).err(),
            from_bytes::<Map>("some_call", bytes).err(),
            from_bytes::<Vec<Vec<Vec<String>>>>("some_call", bytes).err(),
            from_bytes::<serde_json::Value>("some_call", bytes).err(),
        ];
        for error in refused.into_iter().flatten() {
            assert!(error.to_string().contains("some_call: the received object"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn object_from_random_bytes_never_panics(bytes: Vec<u8>) {
            read_all(&bytes);
        }

        #[test]
        fn object_from_changed_bytes_never_panics(
            map: Map,
            header: (String, String, [usize; 2]),
            changes: Vec<(prop::sample::Index, u8)>,
        ) {
            let header: Header = vec![(header.0.into(), header.1, header.2)];
            for mut bytes in [to_bytes("", &map).unwrap(), to_bytes("", &header).unwrap()] {
                let len = bytes.len();
                changes.iter().for_each(|(at, byte)| bytes[at.index(len)] = *byte);
                read_all(&bytes);
            }
        }
    }

    #[test]
    fn frame_with_a_wrong_length_is_refused() {
        let frame = |len: i64| [&len.to_le_bytes()[..], &[0xa1, b'x', 0, 0]].concat();
        assert_eq!(unframe::<String>("some_call", &frame(2)).unwrap(), "x");
        for len in [5, 1 << 30, i64::MAX, -1] {
            let error = unframe::<String>("some_call", &frame(len)).unwrap_err().to_string();
            assert!(error.starts_with("some_call: an object"), "{error}");
        }
        assert!(unframe::<String>("some_call", &[1, 0]).is_err());
    }

    /// Lists nested without an end, and a list that claims to be longer than any memory.
    #[test]
    fn nested_and_huge_lists_are_refused() {
        read_all(&vec![0x91; 1 << 20]);
        read_all(&[0xdd, 0xff, 0xff, 0xff, 0xff]);
        for len in [-1, MAX_OBJECT_BYTES as i64 + 1, i64::MAX] {
            let error = length("some_call", len).unwrap_err().to_string();
            assert!(error.contains(&format!("and {len} are announced")), "{error}");
        }
        assert_eq!(length("some_call", MAX_OBJECT_BYTES as i64).unwrap(), MAX_OBJECT_BYTES);
    }
}
