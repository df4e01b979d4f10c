//! Communication hooks: average a bucket of gradients compressed, or with the user's function.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ffi::TorchResult;
use crate::optim::ParamSpan;
use crate::process_group::{ProcessGroup, ReduceOp};

/// A bucket whose gradients are complete on this rank.
#[derive(Debug)]
pub struct GradBucket<'a> {
    /// Index of the bucket, from 0.
    pub index: usize,
    /// Whether this is the last bucket of the step.
    pub is_last: bool,
    /// The gradients of its parameters in sequence, not divided yet. Gaps between them are zero.
    pub gradients: &'a mut Tensor,
    /// The parameters of the bucket. Each [`ParamSpan::start`] counts from the start of the bucket.
    pub parameters: &'a [ParamSpan],
}

/// A function that averages a bucket over the ranks. Follows DDP's communication hooks.
///
/// Called on the rank's own thread for the buckets in index order, which is the same on every rank. On return,
/// `gradients` must be the same on every rank. On a GPU this holds once the launched work is done.
pub trait CommHook {
    /// Returns the hook's name for messages.
    fn name(&self) -> &'static str;

    /// Averages `bucket` over the ranks of `group`.
    ///
    /// # Errors
    /// The errors of the collectives; they end the run.
    fn reduce(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()>;
}

/// Returns a communication hook that calls a function.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::ddp::hook_fn;
/// use ddp_mp::{ProcessGroup, ReduceOp};
///
/// // The same as DDP's default hook.
/// let hook = hook_fn("mine", |bucket, group: &ProcessGroup| {
///     group.all_reduce(bucket.gradients, ReduceOp::PremulSum(1.0 / group.world_size() as f64))
/// });
/// # drop(hook);
/// # Ok(())
/// # }
/// ```
pub fn hook_fn(
    name: &'static str,
    f: impl FnMut(&mut GradBucket<'_>, &ProcessGroup) -> Result<()> + 'static,
) -> Box<dyn CommHook> {
    struct FromFn<F>(&'static str, F);
    impl<F: FnMut(&mut GradBucket<'_>, &ProcessGroup) -> Result<()>> CommHook for FromFn<F> {
        fn name(&self) -> &'static str {
            self.0
        }
        fn reduce(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()> {
            (self.1)(bucket, group)
        }
    }
    Box::new(FromFn(name, f))
}

/// Returns DDP's averaging operation: each gradient is divided before the sum, as in PyTorch.
pub(super) fn average(group: &ProcessGroup) -> ReduceOp {
    ReduceOp::PremulSum(1.0 / group.world_size() as f64)
}

/// A hook that sends gradients as a 16-bit dtype. Follows `fp16_compress_hook` and `bf16_compress_hook`: converts,
/// divides by the number of ranks, sums, and converts back.
#[derive(Debug)]
pub struct Compress {
    dtype: Kind,
    /// The converted gradients of each bucket; allocated once.
    converted: BTreeMap<usize, Tensor>,
}

impl Compress {
    /// Returns the float16 hook, like `fp16_compress_hook`.
    pub fn fp16() -> Self {
        Self { dtype: Kind::Half, converted: BTreeMap::new() }
    }

    /// Returns the bfloat16 hook, like `bf16_compress_hook`.
    pub fn bf16() -> Self {
        Self { dtype: Kind::BFloat16, converted: BTreeMap::new() }
    }
}

impl CommHook for Compress {
    fn name(&self) -> &'static str {
        if self.dtype == Kind::Half { "fp16_compress" } else { "bf16_compress" }
    }

    fn reduce(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()> {
        let doing = "compressing gradients";
        let known = self.converted.remove(&bucket.index);
        let mut small = match known.filter(|t| t.size() == bucket.gradients.size()) {
            Some(known) => known,
            None => {
                let (shape, device) = (bucket.gradients.size(), bucket.gradients.device());
                Tensor::f_empty(&shape[..], (self.dtype, device)).doing(doing)?
            }
        };
        let convert = || {
            small.f_copy_(bucket.gradients)?;
            small.f_div_scalar_(group.world_size() as f64).map(drop)
        };
        tch::no_grad(convert).doing(doing)?;
        group.all_reduce(&mut small, ReduceOp::Sum)?;
        tch::no_grad(|| bucket.gradients.f_copy_(&small)).doing(doing)?;
        self.converted.insert(bucket.index, small);
        Ok(())
    }
}
