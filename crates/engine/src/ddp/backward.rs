//! One backward pass, from the loss to the averaged gradients.

use tch::Tensor;

use super::reducer::Reducer;
use crate::error::Result;
use crate::ffi;
use crate::ffi::TorchResult;
use crate::runtime::CallSite;

/// Options of a backward pass. Follows the arguments of `Tensor.backward`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BackwardOptions {
    /// Keep the graph for another backward. That one averages too. In PyTorch it averages only after another forward,
    /// and otherwise leaves the ranks with different gradients.
    pub retain_graph: bool,
}

impl Reducer {
    /// Computes the gradients of `loss`, in a backward that was called at `call_site`, and averages them if `averages`.
    /// After an error the caller must [give up](Self::give_up).
    pub(super) fn backward(
        &self,
        loss: &Tensor,
        averages: bool,
        options: BackwardOptions,
        call_site: CallSite,
    ) -> Result<()> {
        let factor = self.state().begin(averages, call_site)?;
        let backward = match factor {
            1.0 => ffi::run_backward(loss, options.retain_graph),
            factor => {
                let scaled = loss.f_mul_scalar(factor).doing("mul")?;
                ffi::run_backward(&scaled, options.retain_graph)
            }
        };
        let mut state = self.state();
        state.backward.is_in_autograd = false; // no hook runs from here on
        // A hook's error takes precedence: it is the cause if backward failed too.
        state.backward.error.take().map_or(backward, Err)?;
        state.layout.take_gradients(averages)?;
        if averages {
            state.reduce_rest()?;
            state.finish()?;
            state.clock.end();
        }
        Ok(())
    }
}
