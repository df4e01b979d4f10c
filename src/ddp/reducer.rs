//! Averages gradients over the ranks, bucket by bucket.

use std::ffi::c_void;

use tch::Tensor;

use super::bucket::{self, Size};
use super::parameters::NamedTensor;
use super::{DdpOptions, elements_per_line, mib};
use crate::error::{Error, Result};
use crate::process_group::{ProcessGroup, ReduceOp, num_bytes};
use crate::torch::{grad_data, set_grad};

/// Parameters that are reduced together, and their gradients.
pub(super) struct Bucket {
    /// The values of all parameters in it, one after the other; each parameter is a view of its part.
    pub parameters: Tensor,
    /// The gradients likewise; each parameter's `grad` is a view.
    pub gradients: Tensor,
    /// How many parameters it has.
    len: usize,
    /// How many of them still lack their gradient in this step.
    pending: usize,
}

/// A parameter's place.
struct Member {
    name: String,
    parameter: Tensor,
    bucket: usize,
    /// Where its gradient must lie: in the bucket.
    grad_data: *const c_void,
}

/// All buckets of a model, in the order in which they are reduced: their index order, on every rank,
/// whichever gradient is ready first.
pub(super) struct Reducer {
    buckets: Vec<Bucket>,
    /// The parameters, in the order of their creation.
    members: Vec<Member>,
    /// The next bucket to reduce in this step.
    next: usize,
}

impl Reducer {
    /// Moves `parameters` into buckets, and makes their `grad`s views.
    pub(super) fn new(parameters: &[&NamedTensor], options: DdpOptions) -> Result<Self> {
        let sizes: Vec<Size> = parameters
            .iter()
            .map(|NamedTensor { tensor, .. }| Size {
                kind: tensor.kind(),
                num_bytes: num_bytes(tensor.kind(), tensor.numel()),
            })
            .collect();
        let assignment =
            bucket::assign(&sizes, mib(options.first_bucket_mb), mib(options.bucket_cap_mb));
        let mut bucket_of = vec![0; parameters.len()];
        let mut buckets = Vec::with_capacity(assignment.len());
        for (number, indices) in assignment.iter().enumerate() {
            indices.iter().for_each(|&index| bucket_of[index] = number);
            let members: Vec<&Tensor> =
                indices.iter().map(|&index| &parameters[index].tensor).collect();
            buckets.push(Bucket::new(&members)?);
        }
        let member = |(named, bucket): (&&NamedTensor, usize)| Member {
            name: named.name.clone(),
            parameter: named.tensor.shallow_clone(),
            bucket,
            grad_data: grad_data(&named.tensor),
        };
        let members = parameters.iter().zip(bucket_of).map(member).collect();
        Ok(Self { buckets, members, next: 0 })
    }

    pub(super) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    pub(super) fn buckets_mut(&mut self) -> &mut [Bucket] {
        &mut self.buckets
    }

    pub(super) fn zero_grad(&mut self) -> Result<()> {
        for bucket in &mut self.buckets {
            let _ = bucket.gradients.f_zero_().map_err(Error::torch("zero_"))?;
        }
        Ok(())
    }

    /// Averages all gradients, once backward is through.
    pub(super) fn reduce(&mut self, group: &ProcessGroup) -> Result<()> {
        self.next = 0;
        self.buckets.iter_mut().for_each(|bucket| bucket.pending = bucket.len);
        for index in (0..self.members.len()).rev() {
            self.mark_ready(index, group)?;
        }
        Ok(())
    }

    /// Notes that a parameter's gradient is complete, and reduces every bucket that is complete and whose
    /// turn it is. The one way into communication: it need not wait for the end of backward.
    fn mark_ready(&mut self, index: usize, group: &ProcessGroup) -> Result<()> {
        let Member { name, parameter, bucket, grad_data: place } = &self.members[index];
        if grad_data(parameter) != *place {
            return Err(Error::Input(format!(
                "the gradient of `{name}` is no longer a view of its bucket, so it cannot be averaged; \
                 somebody has replaced it: zero gradients with DistributedDataParallel::zero_grad, not \
                 with an optimizer's"
            )));
        }
        self.buckets[*bucket].pending -= 1;
        // As PyTorch does, each gradient is divided before it is summed.
        let op = ReduceOp::PremulSum(1.0 / group.world_size() as f64);
        while let Some(bucket) = self.buckets.get_mut(self.next).filter(|b| b.pending == 0) {
            group.all_reduce(&mut bucket.gradients, op)?;
            self.next += 1;
        }
        Ok(())
    }
}

impl Bucket {
    fn new(members: &[&Tensor]) -> Result<Self> {
        let making = || Error::torch("making the buckets");
        let (kind, device) = (members[0].kind(), members[0].device());
        let line = elements_per_line(kind);
        let total: usize = members.iter().map(|p| p.numel().next_multiple_of(line)).sum();
        let allocate = || Tensor::f_zeros([total as i64], (kind, device)).map_err(making());
        let (parameters, gradients) = (allocate()?, allocate()?);
        let mut start = 0;
        for member in members {
            let shape = member.size();
            let part = |flat: &Tensor| {
                let part = flat.f_narrow(0, start as i64, member.numel() as i64);
                part.and_then(|part| part.f_view(&shape[..])).map_err(making())
            };
            let mut value = part(&parameters)?;
            tch::no_grad(|| value.f_copy_(member)).map_err(making())?;
            member.shallow_clone().f_set_data(&value).map_err(making())?;
            set_grad(member, &part(&gradients)?)?;
            start += member.numel().next_multiple_of(line);
        }
        Ok(Self { parameters, gradients, len: members.len(), pending: 0 })
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn parameters_and_gradients_are_views_of_their_bucket() {
        let values =
            [3, 5].map(|n| Tensor::arange(n, (Kind::Float, Device::Cpu)).set_requires_grad(true));
        let named = values.each_ref().map(|value| NamedTensor {
            name: "value".into(),
            tensor: value.shallow_clone(),
            trainable: true,
        });
        let reducer = Reducer::new(&named.each_ref(), DdpOptions::default()).unwrap();
        let bucket = &reducer.buckets()[0];
        // The last one first, each at a cache line of its own, gaps zero.
        let flat = Vec::<f32>::try_from(&bucket.parameters).unwrap();
        assert_eq!(flat.len(), 32);
        assert_eq!(flat[..6], [0., 1., 2., 3., 4., 0.]);
        assert_eq!(flat[16..20], [0., 1., 2., 0.]);

        let loss = (&values[0] * 2).sum(Kind::Float) + (&values[1] * 3).sum(Kind::Float);
        loss.f_backward().unwrap();
        let flat = Vec::<f32>::try_from(&bucket.gradients).unwrap();
        assert_eq!(flat[..6], [3., 3., 3., 3., 3., 0.]);
        assert_eq!(flat[16..20], [2., 2., 2., 0.]);
        assert_eq!(values[0].grad().data_ptr(), bucket.gradients.narrow(0, 16, 3).data_ptr());
    }
}
