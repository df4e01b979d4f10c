//! A simulated network: each all_reduce of all ranks takes as long as it would on the network of a cluster.
//!
//! The ranks are on this machine, and their backend moves the tensors as ever, so the results have the same bits. Then
//! each rank waits for the time that the cost model gives. The communication thread waits, so that backward can hide it.

use std::time::Duration;

use crossbeam::channel::select_biased;
use tch::Device;

use super::ProcessGroup;
use super::call::Call;
use super::dtype::num_bytes;
use crate::error::Result;
use crate::operation::Operation;
use crate::runtime::SimulatedCluster;

impl ProcessGroup {
    /// Returns the cluster whose network this group simulates. Groups of all ranks of the run do, on CPUs.
    pub(super) fn simulated_cluster(&self) -> Option<&SimulatedCluster> {
        let run = self.run();
        let has_all = self.world_size() == run.activity.len();
        run.simulated_cluster.as_ref().filter(|_| has_all && self.device() == Device::Cpu)
    }

    /// Waits as long as `call` takes on the simulated network, if it is an all_reduce.
    pub(super) fn wait_for_simulated_network(&self, call: &Call) -> Result<()> {
        let is_modelled = call.operation == Operation::AllReduce;
        let Some(cluster) = self.simulated_cluster().filter(|_| is_modelled) else { return Ok(()) };
        let (run, bytes) = (self.run(), num_bytes(call.kind, call.numel) as f64);
        let (seconds, _) = cluster.all_reduce(cluster.shape_of(self.world_size()), bytes);
        let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        select_biased! {
            recv(run.cancel.tripped()) -> _ => run.check(self.global_rank()),
            default(time) => Ok(()),
        }
    }
}
