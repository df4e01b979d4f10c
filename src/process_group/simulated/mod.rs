//! A simulated network: each all_reduce of all ranks takes as long as it would on the network of a cluster.
//!
//! The ranks are on this machine, and their backend moves the tensors as ever, so the results have the same bits. Then
//! each rank waits for the time that the cost model gives. The communication thread waits, so that backward can hide it.

mod cluster;
mod cost;

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::select_biased;
use tch::{Device, Tensor};

pub(crate) use cluster::Library;
pub use cluster::SimulatedCluster;
pub(crate) use cost::ClusterShape;

use super::Traffic;
use super::backend::RankBackend;
use super::call::Call;
use super::dtype::num_bytes;
use super::local::Shared;
use super::point_to_point::P2POp;
use crate::error::Result;
use crate::operation::Operation;
use crate::runtime::{NetworkModel, RunContext};

/// One rank's side of a backend whose all_reduces take as long as on a simulated network.
pub(super) struct SimulatedNetwork {
    backend: Box<dyn RankBackend>,
    model: Arc<dyn NetworkModel>,
    run: Arc<RunContext>,
    /// The rank of the run.
    rank: usize,
}

impl SimulatedNetwork {
    /// Returns whether a group simulates a network on this device: a group of all ranks of the run, on CPUs.
    pub(super) fn is_wanted(shared: &Shared, device: Device) -> bool {
        let has_all = shared.members.len() == shared.run.activity.len();
        shared.run.network_model.is_some() && has_all && device == Device::Cpu
    }

    /// Returns `backend` of the group rank `rank` with the network that its run simulates, if it is wanted.
    pub(super) fn or_plain(
        backend: Box<dyn RankBackend>,
        shared: &Shared,
        rank: usize,
        device: Device,
    ) -> Box<dyn RankBackend> {
        let run = &shared.run;
        match &run.network_model {
            Some(model) if Self::is_wanted(shared, device) => {
                let (model, run, rank) = (model.clone(), run.clone(), shared.members[rank]);
                Box::new(Self { backend, model, run, rank })
            }
            _ => backend,
        }
    }
}

impl RankBackend for SimulatedNetwork {
    fn run(&mut self, call: &Call) -> Result<()> {
        self.backend.run(call)?;
        if call.operation != Operation::AllReduce {
            return Ok(());
        }
        let numel: usize = call.inputs.iter().map(Tensor::numel).sum();
        let ranks = self.run.activity.len();
        let time = self.model.all_reduce_time(ranks, num_bytes(call.kind, numel));
        select_biased! {
            recv(self.run.cancel.tripped()) -> _ => self.run.check(self.rank),
            default(time) => Ok(()),
        }
    }

    fn point_to_point(&mut self, messages: &[P2POp]) -> Result<()> {
        self.backend.point_to_point(messages)
    }

    fn traffic(&self, call: &Call) -> Traffic {
        self.backend.traffic(call)
    }

    fn synchronize(&mut self, meanwhile: &dyn Fn()) -> Result<()> {
        self.backend.synchronize(meanwhile)
    }

    fn shut_down(&mut self) {
        self.backend.shut_down();
    }
}

impl NetworkModel for SimulatedCluster {
    fn all_reduce_time(&self, ranks: usize, bytes: usize) -> Duration {
        let (seconds, _) = self.all_reduce(self.shape_of(ranks), bytes as f64);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}
