//! Seeding the process's CPU generator for a moment, so that what is drawn there does not depend on
//! what other threads draw.

use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use super::shim;
use crate::error::Result;

/// Runs `f` with libtorch's CPU generator seeded with `seed`, and then puts the generator back.
///
/// Follows `torch.random.fork_rng` with a `torch.manual_seed(seed)` inside. All threads share that one
/// generator, so this takes turns: with `fork_rng` around the making of a model, every rank draws the
/// same numbers in every run, namely PyTorch's for this seed. Draw nothing on other threads meanwhile
/// except through `fork_rng`, and wait for no other rank in `f`: it may be waiting for its turn.
///
/// # Errors
/// When libtorch refuses; `f`'s own result is handed on inside.
pub fn fork_rng<T>(seed: u64, f: impl FnOnce() -> T) -> Result<T> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let _restore = Restore(shim::cpu_rng_state()?);
    shim::seed_cpu_rng(seed)?;
    Ok(f())
}

/// Puts the state back, also when `f` panics.
struct Restore(Tensor);

impl Drop for Restore {
    fn drop(&mut self) {
        // The state was read from this very generator, so it fits.
        let _ = shim::set_cpu_rng_state(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn draw() -> f64 {
        Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0])
    }

    #[test]
    fn the_same_seed_draws_the_same_on_every_thread() {
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
