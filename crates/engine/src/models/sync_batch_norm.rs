//! Batch normalization over the samples of all ranks.

use std::rc::Rc;

use send_wrapper::SendWrapper;
use tch::nn::{BatchNormConfig, ModuleT, Path};
use tch::{Kind, TchError, Tensor};

use super::BatchNorm;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::process_group::ProcessGroup;
use crate::process_group::functional::all_reduce;

/// Batch normalization with the statistics of the samples of all ranks. N ranks with a batch each give the same
/// result as one rank with all samples.
///
/// Follows `torch.nn.SyncBatchNorm`, and also works on the CPU, where PyTorch's raises an error. In training,
/// forward and backward are collectives: if one rank runs them, every rank must. Batches may differ in size, and
/// may be empty on some ranks.
///
/// Use it as a layer in place of tch's `nn::batch_norm2d`. It belongs to the thread of its rank. It is `Send` only
/// because a [`ModuleT`] must be: using or dropping it on another thread panics.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::{Backend, SyncBatchNorm, spawn};
/// use tch::nn::{ModuleT, VarStore};
/// use tch::{Device, Tensor};
///
/// spawn(2, |rank| {
///     let group = rank.init_process_group(Backend::Threaded)?;
///     let vs = VarStore::new(rank.device());
///     let norm = SyncBatchNorm::new(&vs.root(), 1, SyncBatchNorm::DEFAULT, &group)?;
///     // Rank 0 has -1, rank 1 has 1: mean 0 and variance 1.
///     let mine = [rank.rank() as f32 * 2. - 1.];
///     let output = norm.forward_t(&Tensor::from_slice(&mine).view([1, 1]), true);
///     assert!((output.double_value(&[0, 0]) - f64::from(mine[0])).abs() < 1e-5);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SyncBatchNorm {
    norm: BatchNorm,
    group: SendWrapper<Rc<ProcessGroup>>,
}

impl SyncBatchNorm {
    /// [`BatchNorm::DEFAULT`].
    pub const DEFAULT: BatchNormConfig = BatchNorm::DEFAULT;

    /// Creates a layer for `features` channels over the ranks of `group`, with its parameters and buffers at `path`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) if libtorch fails, for example without enough memory.
    pub fn new(
        path: &Path,
        features: i64,
        config: BatchNormConfig,
        group: &Rc<ProcessGroup>,
    ) -> Result<Self> {
        Ok(Self::convert(BatchNorm::new(path, features, config)?, group))
    }

    /// Converts `norm` into a layer over the ranks of `group`, with the same parameters and buffers.
    pub fn convert(norm: BatchNorm, group: &Rc<ProcessGroup>) -> Self {
        Self { norm, group: SendWrapper::new(group.clone()) }
    }

    /// Returns the underlying batch norm with the parameters and buffers.
    pub fn batch_norm(&self) -> &BatchNorm {
        &self.norm
    }

    /// Normalizes `inputs` of shape (N, C, ...). In training it uses and records the statistics of all ranks' inputs,
    /// in evaluation the running statistics. A collective in training.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when the shape doesn't fit, and the errors of [`ProcessGroup::all_reduce`].
    pub fn f_forward_t(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.f_forward_over(&self.group, inputs, train)
    }
}

impl BatchNorm {
    /// Normalizes `inputs` as [`SyncBatchNorm::f_forward_t`] does, over the ranks of `group`.
    pub(super) fn f_forward_over(
        &self,
        group: &Rc<ProcessGroup>,
        inputs: &Tensor,
        train: bool,
    ) -> Result<Tensor> {
        if !train || group.world_size() == 1 {
            return self.f_forward_t(inputs, train);
        }
        let doing = "sync_batch_norm";
        let (sums, channels) = local_sums(inputs).doing(doing)?;
        let sums = all_reduce(&sums, group)?;
        let [mean, var, count] = statistics(&sums, channels).doing(doing)?;
        tch::no_grad(|| self.track(&mean, &var, &count)).doing(doing)?;
        self.count_batch()?;
        self.normalize(inputs, &mean, &var).doing(doing)
    }

    fn normalize(&self, inputs: &Tensor, mean: &Tensor, var: &Tensor) -> Result<Tensor, TchError> {
        let Self { weight, bias, config, .. } = self;
        let kind = accumulating(inputs);
        // One number per channel, broadcast over inputs of shape (N, C, ...).
        let mut shape = vec![1; inputs.dim()];
        shape[1] = -1;
        let each = |values: &Tensor| values.f_to_kind(kind)?.f_view(&shape[..]);
        let invstd = var.f_add_scalar(config.eps)?.f_rsqrt()?;
        // Subtract the mean first: x * scale + shift loses precision with large means.
        let centered = inputs.f_to_kind(kind)?.f_sub(&each(mean)?)?;
        let output = match (weight, bias) {
            (Some(weight), Some(bias)) => {
                each(bias)?.f_addcmul(&centered, &each(&invstd.f_mul(weight)?)?)?
            }
            _ => centered.f_mul(&each(&invstd)?)?,
        };
        output.f_to_kind(inputs.kind())
    }

    /// Updates the running statistics.
    fn track(&self, mean: &Tensor, var: &Tensor, count: &Tensor) -> Result<(), TchError> {
        let unbiased = var.f_mul(count)?.f_div(&count.f_sub_scalar(1)?)?;
        // An empty batch has no effect. Not read on the host, which would wait for a GPU.
        let some = count.f_gt(0)?.f_to_kind(count.kind())?;
        let momentum = some.f_mul_scalar(self.config.momentum)?;
        for (running, now) in [(&self.running_mean, mean), (&self.running_var, &unbiased)] {
            let kind = running.kind();
            let _ = running
                .shallow_clone()
                .f_lerp_tensor_(&now.f_to_kind(kind)?, &momentum.f_to_kind(kind)?)?;
        }
        Ok(())
    }
}

impl ModuleT for SyncBatchNorm {
    /// Calls [`SyncBatchNorm::f_forward_t`]. Unwinds with its error, which [`spawn`](crate::spawn) reports.
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        super::or_throw(self.f_forward_t(inputs, train))
    }
}

/// Returns the dtype to compute in. Half precision is not enough.
fn accumulating(inputs: &Tensor) -> Kind {
    match inputs.kind() {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        other => other,
    }
}

/// Returns this rank's part of the sums, and the number of channels. One tensor holds the sums of each channel, the
/// sums of squares, and the count.
///
/// The sums are computed from the mean and the variance. With large means, a direct sum of squares is mostly the mean
/// and loses the variance. In float64, even losing as many digits as a float32 has leaves enough.
fn local_sums(inputs: &Tensor) -> Result<(Tensor, i64), TchError> {
    let shape = inputs.size();
    let [_, channels, ..] = shape[..] else {
        return Err(TchError::Shape(format!("expected (N, C, ...), got {shape:?}")));
    };
    let dims: Vec<i64> = (0..shape.len() as i64).filter(|&dim| dim != 1).collect();
    let count: i64 = dims.iter().map(|&dim| shape[dim as usize]).product();
    let inputs = inputs.f_to_kind(accumulating(inputs))?;
    let (var, mean) = if count == 0 {
        // Zeros that depend on the inputs, so that this rank takes part in backward.
        let zeros = inputs.f_sum_dim_intlist(&dims[..], false, None)?;
        (zeros.shallow_clone(), zeros)
    } else {
        inputs.f_var_mean_correction(&dims[..], 0, false)?
    };
    let (var, mean) = (var.f_to_kind(Kind::Double)?, mean.f_to_kind(Kind::Double)?);
    let squares = mean.f_square()?.f_add(&var)?.f_mul_scalar(count as f64)?;
    let count = Tensor::f_full([1], count as f64, (Kind::Double, inputs.device()))?;
    Ok((Tensor::f_cat(&[mean.f_mul(&count)?, squares, count], 0)?, channels))
}

/// Computes the statistics of the batches of all ranks from the sums over all ranks, in float64: the mean and the biased
/// variance (divided by the count) of each channel, and the count, which is the number of values per channel.
fn statistics(sums: &Tensor, channels: i64) -> Result<[Tensor; 3], TchError> {
    let count = sums.f_detach()?.f_select(0, 2 * channels)?;
    // If no rank has samples, the sums are zeros, and the statistics are too.
    let at_least_one = count.f_clamp_min(1)?;
    let mean = sums.f_narrow(0, 0, channels)?.f_div(&at_least_one)?;
    let squares = sums.f_narrow(0, channels, channels)?.f_div(&at_least_one)?;
    let var = squares.f_sub(&mean.f_square()?)?.f_clamp_min(0)?;
    Ok([mean, var, count])
}
