//! The guard of gradient accumulation.

use std::cell::Cell;
use std::rc::Rc;

/// A guard: gradients stay on their rank until it is dropped. From
/// [`DistributedDataParallel::no_sync`](super::DistributedDataParallel::no_sync).
#[derive(Debug)]
#[must_use = "gradients are averaged again when it is dropped"]
pub struct NoSync {
    depth: Rc<Cell<u32>>,
}

impl NoSync {
    pub(super) fn new(depth: &Rc<Cell<u32>>) -> Self {
        depth.set(depth.get() + 1);
        Self { depth: depth.clone() }
    }
}

impl Drop for NoSync {
    fn drop(&mut self) {
        self.depth.set(self.depth.get() - 1);
    }
}
