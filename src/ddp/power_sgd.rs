//! PowerSGD: compresses gradients to products of two thin matrices.

use std::collections::BTreeMap;

use rand_mt::Mt;
use tch::{Device, Kind, Tensor};

use super::comm_hooks::{CommHook, CommHookState, GradBucket, average};
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, fork_rng};
use crate::optim::ParamSpan;
use crate::process_group::ProcessGroup;

/// A hook that sends gradients as products of two thin matrices. Follows `powerSGD_hook`. Matrices that would shrink by
/// `min_compression_rate` are approximated by one power iteration; everything else is averaged as it is. The
/// approximation error is added to the next step's gradient. The first factors are random, and the same as PyTorch's.
#[derive(Debug)]
pub struct PowerSgd {
    options: PowerSgdOptions,
    iteration: u64,
    /// The generator of seeds, in the same state on all ranks.
    seeds: Mt,
    /// The number of draws from `seeds`.
    draws: u64,
    state: BTreeMap<usize, BucketState>,
    /// The errors and factors from a checkpoint that no bucket has taken yet.
    loaded: CommHookState,
    /// Whether that run had already started to compress.
    is_resumed: bool,
}

/// The options of [`PowerSgd`]. Follows `PowerSGDState`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerSgdOptions {
    /// Rank of the approximation; higher is more accurate and sends more.
    pub matrix_approximation_rank: i64,
    /// The number of first iterations that average without compression.
    pub start_iter: u64,
    /// Smallest factor by which a matrix must shrink to be compressed.
    pub min_compression_rate: f64,
    /// Whether the approximation error is added to the next gradient.
    pub use_error_feedback: bool,
    /// Whether an iteration starts from the previous one's factor.
    pub warm_start: bool,
    /// Seed of the first factors, the same on all ranks; only its lower 32 bits are used.
    pub seed: u64,
}

impl Default for PowerSgdOptions {
    /// Returns PyTorch's defaults.
    fn default() -> Self {
        Self {
            matrix_approximation_rank: 1,
            start_iter: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            seed: 0,
        }
    }
}

/// The state that a bucket keeps between iterations.
#[derive(Debug)]
struct BucketState {
    /// The bucket's parameters at that time; after the first iteration they may differ.
    parameters: Vec<ParamSpan>,
    /// The approximation error, in the shape of the bucket.
    error: Tensor,
    /// The second factor of each compressed matrix, by the start of its parameter in the bucket.
    factors: BTreeMap<usize, Tensor>,
}

impl CommHook for PowerSgd {
    fn name(&self) -> &'static str {
        "powerSGD"
    }

    fn reduce(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()> {
        let iteration = self.iteration;
        self.iteration += u64::from(bucket.is_last);
        if iteration < self.options.start_iter {
            return group.all_reduce(bucket.gradients, average(group));
        }
        tch::no_grad(|| self.approximate(bucket, group))
    }

    fn state(&self) -> Result<Option<CommHookState>> {
        let counters = [(ITERATION, self.iteration), (DRAWS, self.draws)];
        let counters = counters.into_iter().map(|(name, count)| (name.into(), count)).collect();
        let mut state = CommHookState { counters, ..CommHookState::default() };
        // The loaded state that no bucket has taken yet is unchanged.
        for (all, loaded) in
            [(&mut state.shared, &self.loaded.shared), (&mut state.local, &self.loaded.local)]
        {
            all.extend(loaded.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())));
        }
        for BucketState { parameters, error, factors } in self.state.values() {
            for ParamSpan { name, start, shape, .. } in parameters {
                let Some(factor) = factors.get(start) else { continue };
                state.shared.insert(format!("{FACTOR}{name}"), factor.shallow_clone());
                if self.options.use_error_feedback {
                    let lost = error.f_narrow(0, *start as i64, shape.iter().product());
                    let lost = lost.doing("PowerSGD")?;
                    state.local.insert(format!("{ERROR}{name}"), lost);
                }
            }
        }
        Ok(Some(state))
    }

    fn load_state(&mut self, state: CommHookState) -> Result<()> {
        let count = |name: &str| {
            state.counters.get(name).copied().ok_or_else(|| {
                Error::InvalidInput(format!(
                    "the state of the communication hook `powerSGD` has no `{name}`; use another checkpoint"
                ))
            })
        };
        let (iteration, draws) = (count(ITERATION)?, count(DRAWS)?);
        // The draws are repeated below, one by one.
        if draws > u32::MAX.into() {
            return Err(Error::InvalidInput(format!(
                "the state of the communication hook `powerSGD` has {draws} draws, more than a run \
                 can make; use another checkpoint"
            )));
        }
        let is_resumed = iteration > self.options.start_iter;
        *self = Self { iteration, loaded: state, is_resumed, ..Self::new(self.options) };
        for _ in 0..draws {
            self.draw();
        }
        Ok(())
    }
}

/// The keys of the saved state: two counters, and an error and a factor for each compressed parameter.
const ITERATION: &str = "iteration";
const DRAWS: &str = "draws";
const ERROR: &str = "error/";
const FACTOR: &str = "factor/";

impl PowerSgd {
    /// Returns a hook with these options.
    pub fn new(options: PowerSgdOptions) -> Self {
        let seeds = Mt::new(options.seed as u32);
        let (state, loaded) = (BTreeMap::new(), CommHookState::default());
        Self { options, iteration: 0, seeds, draws: 0, state, loaded, is_resumed: false }
    }

    fn draw(&mut self) -> u32 {
        self.draws += 1;
        self.seeds.next_u32()
    }

    /// Draws like numpy's `RandomState.randint(1_000_000_000)`.
    fn draw_seed(&mut self) -> u64 {
        loop {
            let number = self.draw() & 0x3fff_ffff;
            if number < 1_000_000_000 {
                return number.into();
            }
        }
    }

    /// Returns a parameter's rows, columns and approximation rank; `None` if it is not worth compressing.
    fn matrix(&self, shape: &[i64]) -> Option<(i64, i64, i64)> {
        let (&rows, rest) = shape.split_first()?;
        let columns: i64 = rest.iter().product();
        let rank = self.options.matrix_approximation_rank.min(rows).min(columns);
        let compressed = (rows + columns) * rank;
        let is_worth_it =
            compressed as f64 * self.options.min_compression_rate < (rows * columns) as f64;
        (!rest.is_empty() && is_worth_it).then_some((rows, columns, rank))
    }

    /// Returns the initial state of a bucket: that of an earlier run, or else an error of zero.
    fn begin(&mut self, bucket: &GradBucket<'_>) -> Result<BucketState> {
        let doing = "PowerSGD";
        let error = bucket.gradients.f_zeros_like().doing(doing)?;
        let mut factors = BTreeMap::new();
        for ParamSpan { name, start, shape, .. } in bucket.parameters {
            let Some((rows, columns, rank)) = self.matrix(shape) else { continue };
            if let Some(lost) = self.loaded.local.remove(&format!("{ERROR}{name}")) {
                check_shape(name, &lost, &[rows * columns])?;
                let part = error.f_narrow(0, *start as i64, rows * columns);
                part.and_then(|mut part| part.f_copy_(&lost)).doing(doing)?;
            }
            if let Some(factor) = self.loaded.shared.remove(&format!("{FACTOR}{name}")) {
                check_shape(name, &factor, &[columns, rank])?;
                factors.insert(*start, factor);
            }
        }
        // Drops the state of old buckets that shared a parameter with this one.
        let moved = |old: &ParamSpan| bucket.parameters.iter().any(|new| new.name == old.name);
        self.state.retain(|_, state| !state.parameters.iter().any(moved));
        Ok(BucketState { parameters: bucket.parameters.to_vec(), error, factors })
    }

    fn approximate(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()> {
        let doing = "PowerSGD";
        let kind = bucket.gradients.kind();
        let is_new =
            self.state.get(&bucket.index).is_none_or(|s| s.parameters != bucket.parameters);
        let matrices: Vec<(usize, i64, i64, i64)> = bucket
            .parameters
            .iter()
            .filter_map(|span| self.matrix(&span.shape).map(|(n, m, r)| (span.start, n, m, r)))
            .collect();
        if is_new {
            let state = self.begin(bucket)?;
            self.state.insert(bucket.index, state);
        }
        let continues =
            |state: &BucketState| self.is_resumed && state.factors.len() == matrices.len();
        let begins = is_new && !self.state.get(&bucket.index).is_some_and(continues);
        let needs_factors = begins || !self.options.warm_start;
        // The seed is the same on every rank. It differs between buckets and, without warm start, between iterations.
        let seed = needs_factors.then(|| self.draw_seed());
        let Some(state) = self.state.get_mut(&bucket.index) else { return Ok(()) };
        if let Some(seed) = seed {
            let draw = |&(start, _, m, r): &(usize, i64, i64, i64)| {
                Ok((start, Tensor::f_randn([m, r], (kind, Device::Cpu))?))
            };
            let drawn = fork_rng(seed, || matrices.iter().map(draw).collect::<Result<Vec<_>, _>>());
            let drawn = drawn?.doing(doing)?.into_iter();
            let factors = drawn.map(|(start, q)| Ok((start, group.to_device(&q)?)));
            state.factors = factors.collect::<Result<_>>()?;
        }
        if self.options.use_error_feedback {
            let _ = bucket.gradients.f_add_(&state.error).doing(doing)?;
        }
        let before = bucket.gradients.copy();
        let view = |flat: &Tensor, start: usize, n: i64, m: i64| {
            flat.f_narrow(0, start as i64, n * m)?.f_view([n, m])
        };

        // P = M Q, averaged, made orthogonal; Q = M^T P, averaged; M ~ P Q^T.
        let mut ps = Vec::with_capacity(matrices.len());
        for &(start, n, m, _) in &matrices {
            let q = orthogonalize(&state.factors[&start]).doing(doing)?;
            let matrix = view(bucket.gradients, start, n, m).doing(doing)?;
            ps.push(matrix.f_matmul(&q).doing(doing)?.f_contiguous().doing(doing)?);
        }
        average_uncompressed(bucket, &matrices, group)?;
        for (&(start, n, m, _), p) in matrices.iter().zip(&mut ps) {
            group.all_reduce(p, average(group))?;
            *p = orthogonalize(p).doing(doing)?;
            let matrix = view(&before, start, n, m).doing(doing)?;
            let q = || matrix.f_tr()?.f_matmul(p)?.f_contiguous();
            let mut q = q().doing(doing)?;
            group.all_reduce(&mut q, average(group))?;
            let product = q.f_tr().and_then(|q| p.f_matmul(&q)).doing(doing)?;
            view(bucket.gradients, start, n, m)
                .and_then(|mut v| v.f_copy_(&product))
                .doing(doing)?;
            state.factors.insert(start, q);
        }
        if self.options.use_error_feedback {
            let _ = state.error.f_zero_().doing(doing)?;
            for &(start, n, m, _) in &matrices {
                let lost = || {
                    let lost =
                        view(&before, start, n, m)?.f_sub(&view(bucket.gradients, start, n, m)?)?;
                    view(&state.error, start, n, m)?.f_copy_(&lost)
                };
                lost().doing(doing)?;
            }
        }
        Ok(())
    }
}

/// Averages the gradients that are not among `matrices` as they are, in one tensor.
fn average_uncompressed(
    bucket: &GradBucket<'_>,
    matrices: &[(usize, i64, i64, i64)],
    group: &ProcessGroup,
) -> Result<()> {
    let doing = "PowerSGD";
    let is_compressed = |span: &&ParamSpan| matrices.iter().any(|matrix| matrix.0 == span.start);
    let rest = bucket.parameters.iter().filter(|span| !is_compressed(span) && span.numel() > 0);
    let part =
        |span: &ParamSpan| bucket.gradients.f_narrow(0, span.start as i64, span.numel() as i64);
    let mut parts: Vec<Tensor> = rest.map(part).collect::<Result<_, _>>().doing(doing)?;
    if parts.is_empty() {
        return Ok(());
    }
    let mut joined = Tensor::f_cat(&parts, 0).doing(doing)?;
    group.all_reduce(&mut joined, average(group))?;
    let lengths: Vec<i64> = parts.iter().map(|part| part.numel() as i64).collect();
    let averages = joined.f_split_with_sizes(&lengths[..], 0).doing(doing)?;
    let mut pairs = parts.iter_mut().zip(&averages);
    pairs.try_for_each(|(part, average)| part.f_copy_(average)).doing(doing)
}

/// Returns an error if a saved tensor does not have the model's shape.
fn check_shape(name: &str, saved: &Tensor, shape: &[i64]) -> Result<()> {
    let found = saved.size();
    if found == shape {
        return Ok(());
    }
    Err(Error::InvalidInput(format!(
        "the state of the communication hook `powerSGD` has {found:?} numbers for `{name}`, and here it needs \
         {shape:?}; use the options and the model of the run that was saved"
    )))
}

/// Returns an orthonormal basis of the columns.
fn orthogonalize(matrix: &Tensor) -> Result<Tensor, tch::TchError> {
    // QR requires at least single precision.
    let kind = matrix.kind();
    let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    let (q, _) = Tensor::f_linalg_qr(&matrix.f_to_kind(wide)?, "reduced")?;
    q.f_to_kind(kind)
}
