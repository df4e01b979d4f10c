//! PowerSGD, a communication hook that sends gradients as products of two thin matrices.

use std::collections::BTreeMap;

use ddp_mp::ddp::{CommHook, GradBucket};
use ddp_mp::optim::ParamSpan;
use ddp_mp::{ProcessGroup, ReduceOp, Result, fork_rng};
use rand_mt::Mt;
use tch::{Device, Kind, Tensor};

/// A hook that approximates each gradient by a product of two thin matrices, and sends only those. Follows PyTorch's
/// `powerSGD_hook` with error feedback and warm start, and draws the same first factors. Gradients that would not
/// shrink by `min_compression_rate` are averaged as they are.
pub struct PowerSgd {
    options: PowerSgdOptions,
    iteration: u64,
    /// The generator of seeds, in the same state on all ranks.
    seeds: Mt,
    /// The state of each bucket, by its index.
    state: BTreeMap<usize, BucketState>,
}

/// The options of [`PowerSgd`]. Follows `PowerSGDState`.
pub struct PowerSgdOptions {
    /// The rank of the approximation. A higher one is more accurate and sends more.
    pub matrix_approximation_rank: i64,
    /// The number of first iterations that average without compression.
    pub start_iter: u64,
    /// The smallest factor by which a matrix must shrink to be compressed.
    pub min_compression_rate: f64,
    /// The seed of the first factors, the same on all ranks.
    pub seed: u32,
}

impl Default for PowerSgdOptions {
    fn default() -> Self {
        Self { matrix_approximation_rank: 1, start_iter: 1000, min_compression_rate: 2.0, seed: 0 }
    }
}

/// The state of a bucket, which it keeps from one iteration to the next.
struct BucketState {
    /// The bucket's parameters at that time: after the first iteration they may be others.
    parameters: Vec<ParamSpan>,
    /// The part of the gradient that the approximation has lost. It is added to the next gradient.
    error: Tensor,
    /// The second factor Q of each matrix.
    factors: Vec<Tensor>,
}

/// A gradient that is worth compressing, as a matrix.
struct Matrix {
    /// Where it begins in the bucket, in elements.
    start: usize,
    rows: i64,
    columns: i64,
    /// The number of columns of both factors.
    rank: i64,
}

impl Matrix {
    /// Returns the matrix in `bucket`, as a view.
    fn of(&self, bucket: &Tensor) -> Tensor {
        bucket
            .narrow(0, self.start as i64, self.rows * self.columns)
            .view([self.rows, self.columns])
    }
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
}

impl PowerSgd {
    pub fn new(options: PowerSgdOptions) -> Self {
        Self { iteration: 0, seeds: Mt::new(options.seed), state: BTreeMap::new(), options }
    }

    fn approximate(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()> {
        let spans = bucket.parameters.iter();
        let matrices: Vec<Matrix> = spans.filter_map(|span| self.matrix(span)).collect();
        let known = self.state.remove(&bucket.index);
        let mut state = match known.filter(|known| known.parameters == bucket.parameters) {
            Some(known) => known,
            None => self.begin(bucket, &matrices, group)?,
        };
        *bucket.gradients += &state.error;
        let before = bucket.gradients.copy();

        // P = M Q, averaged, made orthogonal; Q = M^T P, averaged. Then P Q^T is near the mean of M.
        let pairs = matrices.iter().zip(&state.factors);
        let products = pairs.map(|(it, q)| it.of(&before).matmul(&orthogonalize(q)).contiguous());
        let products: Vec<Tensor> = products.collect();
        average_uncompressed(bucket, &matrices, group)?;
        for ((matrix, mut p), q) in matrices.iter().zip(products).zip(&mut state.factors) {
            group.all_reduce(&mut p, average(group))?;
            let (p, before) = (orthogonalize(&p), matrix.of(&before));
            *q = before.tr().matmul(&p).contiguous();
            group.all_reduce(q, average(group))?;
            let mut approximation = matrix.of(bucket.gradients);
            approximation.copy_(&p.matmul(&q.tr()));
            matrix.of(&state.error).copy_(&(before - approximation));
        }
        self.state.insert(bucket.index, state);
        Ok(())
    }

    /// Returns a parameter's gradient as a matrix. `None` if it is not worth compressing.
    fn matrix(&self, span: &ParamSpan) -> Option<Matrix> {
        let (&rows, rest) = span.shape.split_first()?;
        let columns: i64 = rest.iter().product();
        let rank = self.options.matrix_approximation_rank.min(rows).min(columns);
        let compressed = ((rows + columns) * rank) as f64;
        let is_smaller = compressed * self.options.min_compression_rate < (rows * columns) as f64;
        let start = span.start;
        (!rest.is_empty() && is_smaller).then_some(Matrix { start, rows, columns, rank })
    }

    /// Returns the first state of a bucket: no error, and random factors, which are the same on all ranks.
    fn begin(
        &mut self,
        bucket: &GradBucket<'_>,
        matrices: &[Matrix],
        group: &ProcessGroup,
    ) -> Result<BucketState> {
        let (kind, device) = (bucket.gradients.kind(), bucket.gradients.device());
        let draw = |it: &Matrix| Tensor::randn([it.columns, it.rank], (kind, Device::Cpu));
        let drawn: Vec<_> = fork_rng(self.draw_seed(), || matrices.iter().map(draw).collect())?;
        group.synchronize()?; // otherwise the copy to a GPU would wait behind collectives, and no failure would end that
        Ok(BucketState {
            parameters: bucket.parameters.to_vec(),
            error: bucket.gradients.zeros_like(),
            factors: drawn.iter().map(|factor| factor.to_device(device)).collect(),
        })
    }

    /// Draws like numpy's `RandomState.randint(1_000_000_000)`.
    fn draw_seed(&mut self) -> u64 {
        loop {
            let drawn = self.seeds.next_u32() & 0x3fff_ffff;
            if drawn < 1_000_000_000 {
                return drawn.into();
            }
        }
    }
}

/// Returns the operation with which DDP averages.
fn average(group: &ProcessGroup) -> ReduceOp {
    ReduceOp::PremulSum(1.0 / group.world_size() as f64)
}

/// Averages the gradients that are not among `matrices` as they are, in one tensor.
fn average_uncompressed(
    bucket: &GradBucket<'_>,
    matrices: &[Matrix],
    group: &ProcessGroup,
) -> Result<()> {
    let is_compressed = |span: &&ParamSpan| matrices.iter().any(|it| it.start == span.start);
    let rest = bucket.parameters.iter().filter(|span| !is_compressed(span) && span.numel() > 0);
    let part = |it: &ParamSpan| bucket.gradients.narrow(0, it.start as i64, it.numel() as i64);
    let mut parts: Vec<Tensor> = rest.map(part).collect();
    if parts.is_empty() {
        return Ok(());
    }
    let mut joined = Tensor::cat(&parts, 0);
    group.all_reduce(&mut joined, average(group))?;
    let lengths: Vec<i64> = parts.iter().map(|part| part.numel() as i64).collect();
    for (part, average) in parts.iter_mut().zip(joined.split_with_sizes(&lengths[..], 0)) {
        part.copy_(&average);
    }
    Ok(())
}

/// Returns an orthonormal basis of the columns.
fn orthogonalize(matrix: &Tensor) -> Tensor {
    // QR takes single and double precision.
    let kind = matrix.kind();
    let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    let (q, _) = Tensor::linalg_qr(&matrix.to_kind(wide), "reduced");
    q.to_kind(kind)
}
