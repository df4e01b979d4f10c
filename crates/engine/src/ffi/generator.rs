//! Random numbers, for dropout: [`Generator`], a generator for one rank, and [`fork_rng`] for libtorch's own.

use std::ffi::{c_char, c_int};

use parking_lot::Mutex;
use tch::{Device, Tensor};
use torch_sys::C_tensor;
use xxhash_rust::xxh3::xxh3_64;

use super::TorchResult;
use super::shim::{Object, check, failed_in, raw};
use crate::error::{Result, opaque_debug};

/// `at::Generator`, only ever behind a pointer.
enum RawGenerator {}

unsafe extern "C" {
    fn ddp_cpu_rng_swap(generator: *mut RawGenerator) -> *mut c_char;
    fn ddp_generator_new(gpu: c_int, generator: *mut *mut RawGenerator) -> *mut c_char;
    fn ddp_generator_free(generator: *mut RawGenerator);
    fn ddp_generator_seed(generator: *mut RawGenerator, seed: u64) -> *mut c_char;
    fn ddp_generator_bernoulli(
        generator: *mut RawGenerator,
        tensor: *mut C_tensor,
        p: f64,
    ) -> *mut c_char;
    fn ddp_generator_exponential(
        generator: *mut RawGenerator,
        tensor: *mut C_tensor,
    ) -> *mut c_char;
}

/// A random number generator for one rank, on its device. Other ranks do not affect its numbers. Follows
/// `torch.Generator`.
///
/// libtorch's default generators belong to the process (on the CPU) or to a GPU. Ranks that share one draw from it
/// in random order, so `Tensor::dropout` gives different numbers in every run.
pub struct Generator {
    raw: Object<RawGenerator>,
    seed: u64,
    rank: u64,
}

opaque_debug!(Generator);

impl Generator {
    /// Creates the generator of `rank` in a run with `seed`, in its state at the beginning of step 0.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) if there is no such device.
    pub fn new(device: Device, seed: u64, rank: usize) -> Result<Self> {
        let gpu = match device {
            Device::Cuda(gpu) => gpu as c_int,
            _ => -1, // the CPU
        };
        // SAFETY: a generator is freed with `ddp_generator_free`.
        let raw = unsafe { Object::new(ddp_generator_free, |raw| ddp_generator_new(gpu, raw)) };
        let raw = raw.map_err(failed_in("making a generator"))?;
        let generator = Self { raw, seed, rank: rank as u64 };
        generator.begin_step(0)?;
        Ok(generator)
    }

    /// Sets the state for the beginning of step `step`. A step's numbers depend only on the seed, the rank and the
    /// step, so a resumed run draws the same numbers.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn begin_step(&self, step: u64) -> Result<()> {
        // Hashed, because a plain sum could equal the seed of another rank or of another run.
        let bytes = [self.seed, self.rank, step].map(u64::to_le_bytes).concat();
        self.manual_seed(xxh3_64(&bytes))
    }

    /// Sets the seed. Follows `torch.Generator.manual_seed`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn manual_seed(&self, seed: u64) -> Result<()> {
        // SAFETY: ours, and not freed before `drop`.
        check("seeding a generator", unsafe { ddp_generator_seed(self.raw.at, seed) })
    }

    /// Exchanges the states of this generator, which is for the CPU, and of libtorch's own for the CPU.
    fn swap(&self) -> Result<()> {
        // SAFETY: ours, and not freed before `drop`.
        check("the CPU generator", unsafe { ddp_cpu_rng_swap(self.raw.at) })
    }

    /// Fills `tensor` with ones, each with probability `p`, and zeros. Follows `Tensor.bernoulli_`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn bernoulli_(&self, tensor: &mut Tensor, p: f64) -> Result<()> {
        // SAFETY: ours, and not freed before `drop`; the tensor is live.
        let filled = unsafe { ddp_generator_bernoulli(self.raw.at, raw(tensor), p) };
        check("bernoulli_", filled)
    }

    /// Fills `tensor` with numbers of the exponential distribution of rate 1. Follows `Tensor.exponential_`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn exponential_(&self, tensor: &mut Tensor) -> Result<()> {
        // SAFETY: ours, and not freed before `drop`; the tensor is live.
        check("exponential_", unsafe { ddp_generator_exponential(self.raw.at, raw(tensor)) })
    }

    /// Returns `input` with each element zeroed with probability `p`, and the others scaled so that the mean stays.
    /// Follows `torch.nn.functional.dropout`, with the same numbers for the same seed.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn dropout(&self, input: &Tensor, p: f64) -> Result<Tensor> {
        let mut mask = input.detach().f_empty_like().doing("dropout")?;
        self.bernoulli_(&mut mask, 1.0 - p)?;
        // With p = 1 nothing is left to scale.
        let mut scaled = || {
            if p < 1.0 {
                let _ = mask.f_div_scalar_(1.0 - p)?;
            }
            input.f_mul(&mask)
        };
        scaled().doing("dropout")
    }
}

// SAFETY: libtorch counts references to its generators atomically, and every use of one takes its mutex: those of
// the shim, and those of the kernels.
unsafe impl Send for Generator {}
// SAFETY: likewise.
unsafe impl Sync for Generator {}

/// Runs `f` with libtorch's CPU generator seeded with `seed`, then restores the generator.
///
/// Follows `torch.random.fork_rng` with a `torch.manual_seed(seed)` inside. All threads share the generator, so calls
/// take turns. With `fork_rng` around the creation of a model, every rank draws the same numbers in every run, namely
/// PyTorch's for this seed. Meanwhile other threads must draw only through `fork_rng`. Do not wait for another rank
/// in `f`: that rank may be waiting for its turn.
///
/// # Errors
/// If libtorch fails. The result of `f` is returned inside `Ok`.
pub fn fork_rng<T>(seed: u64, f: impl FnOnce() -> T) -> Result<T> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    let generator = Generator::new(Device::Cpu, seed, 0)?;
    generator.manual_seed(seed)?;
    generator.swap()?;
    let _restore = Restore(generator);
    Ok(f())
}

/// Restores the state, even if `f` panics.
struct Restore(Generator);

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = self.0.swap(); // cannot fail: this was done before
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    fn mask(generator: &Generator) -> Vec<f32> {
        let ones = Tensor::ones([200], (Kind::Float, Device::Cpu));
        Vec::try_from(generator.dropout(&ones, 0.25).unwrap()).unwrap()
    }

    #[test]
    fn dropout_matches_pytorch_for_the_same_seed() {
        let generator = Generator::new(Device::Cpu, 0, 0).unwrap();
        generator.manual_seed(5).unwrap();
        let ones = Tensor::ones([200], (Kind::Float, Device::Cpu));
        let theirs = fork_rng(5, || ones.dropout(0.25, true)).unwrap();
        assert_eq!(mask(&generator), Vec::<f32>::try_from(theirs).unwrap());
    }

    #[test]
    fn draws_depend_only_on_seed_rank_and_step() {
        let new = |seed, rank| Generator::new(Device::Cpu, seed, rank).unwrap();
        let (one, same) = (new(3, 1), new(3, 1));
        assert_eq!(mask(&one), mask(&same));
        assert_ne!(mask(&one), mask(&new(3, 1)), "the second draw");
        one.begin_step(7).unwrap();
        new(3, 0).begin_step(7).unwrap(); // does not affect the other generator
        let at_seven = mask(&one);
        one.begin_step(7).unwrap();
        assert_eq!(mask(&one), at_seven);
        for other in [new(4, 0), new(2, 2), new(3, 2)] {
            other.begin_step(7).unwrap();
            assert_ne!(mask(&other), at_seven, "{} {}", other.seed, other.rank);
        }
    }

    fn draw() -> f64 {
        Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0])
    }

    #[test]
    fn fork_rng_same_seed_draws_the_same_on_every_thread() {
        let expected = fork_rng(42, draw).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        assert_eq!(fork_rng(42, draw).unwrap(), expected);
                    }
                });
            }
        });
    }
}
