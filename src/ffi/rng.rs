//! Seeds the process's CPU generator temporarily, so that a thread's numbers do not depend on other threads.

use parking_lot::Mutex;

use tch::Tensor;

use super::shim;
use crate::error::Result;

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
    let _restore = Restore(shim::cpu_rng_state()?);
    shim::seed_cpu_rng(seed)?;
    Ok(f())
}

/// Restores the state, even if `f` panics.
struct Restore(Tensor);

impl Drop for Restore {
    fn drop(&mut self) {
        // Cannot fail: the state was read from this generator.
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
