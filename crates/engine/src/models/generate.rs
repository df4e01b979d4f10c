//! [`Generate`]: continues a sequence of tokens with a model that predicts the next one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;

use tch::{Device, Kind, TchError, Tensor};

use super::Forward;
use crate::error::{Error, Result};
use crate::ffi::{Generator, TorchResult};

/// The logits divided by less may become infinite.
const SMALLEST_TEMPERATURE: f64 = 1e-6;

/// How [`Generate`] draws tokens. The defaults draw from the model's own probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GenerateOptions {
    /// The most tokens that the model sees: its context. Older tokens are cut off.
    pub block_size: i64,
    /// The divisor of the logits: below 1 likely tokens become likelier. With less than 1e-6 the likeliest token is
    /// taken.
    pub temperature: f64,
    /// The number of likeliest tokens to draw from; `None` for all.
    pub top_k: Option<i64>,
    /// The seed of the draws.
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { block_size: 64, temperature: 1.0, top_k: None, seed: 0 }
    }
}

/// An endless iterator over the tokens that a model writes after a prompt.
///
/// The model takes tokens of shape `[1, positions]` (int64) and returns logits of shape `[1, positions, vocabulary]`,
/// as [`ModelKind::Gpt`](super::ModelKind::Gpt) does.
///
/// Follows `GPT.generate` of nanoGPT after `torch.manual_seed(seed)`: the same logits give the same tokens.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use ddp_mp::models::{Generate, GenerateOptions, ModelConfig, ModelKind};
/// use tch::Device;
///
/// let kind = ModelKind::Gpt;
/// let config = ModelConfig { kind, in_features: 8, out_features: 256, ..ModelConfig::default() };
/// let (_vs, model) = config.build(Device::Cpu, 0)?;
/// let prompt: Vec<i64> = b"To be, or".iter().map(|&byte| byte.into()).collect();
/// let options = GenerateOptions { block_size: 8, ..GenerateOptions::default() };
/// let tokens = Generate::new(&model, &prompt, options, Device::Cpu)?;
/// let bytes = tokens.take(5).map(|token| token.map(|token| token as u8));
/// println!("{}", String::from_utf8_lossy(&bytes.collect::<ddp_mp::Result<Vec<_>>>()?));
/// # Ok::<(), ddp_mp::Error>(())
/// ```
#[derive(Debug)]
pub struct Generate<'a, M> {
    model: &'a M,
    options: GenerateOptions,
    generator: Generator,
    /// The last tokens, of shape `[1, positions]`.
    context: Tensor,
}

impl<'a, M: Forward> Generate<'a, M> {
    /// Starts after `prompt`, with a `model` on `device`.
    ///
    /// # Errors
    /// [`Error::Input`] for an empty prompt, and for options out of their range; [`Error::Torch`].
    pub fn new(
        model: &'a M,
        prompt: &[i64],
        options: GenerateOptions,
        device: Device,
    ) -> Result<Self> {
        let GenerateOptions { block_size, temperature, top_k, seed } = options;
        let problem = if prompt.is_empty() {
            Some("the prompt is empty; use at least one token, for example a line break".into())
        } else if block_size < 1 {
            Some(format!("a context of {block_size} tokens is too small; use 1 or more"))
        } else if !(temperature >= 0.0 && temperature.is_finite()) {
            Some(format!("the temperature {temperature} is not possible; use 0 or more"))
        } else {
            top_k.filter(|&k| k < 1).map(|_| "top_k is too small; use 1 or more".into())
        };
        if let Some(problem) = problem {
            return Err(Error::usage(problem));
        }
        let generator = Generator::new(device, seed, 0)?;
        generator.manual_seed(seed)?;
        let context = Tensor::f_from_slice(prompt).and_then(|prompt| prompt.f_unsqueeze(0));
        let context =
            context.and_then(|context| context.f_to_device(device)).doing("the prompt")?;
        Ok(Self { model, options, generator, context })
    }

    /// Draws the next token, and appends it to the context.
    fn draw(&mut self) -> Result<i64> {
        let positions = self.context.size()[1];
        let seen = positions.min(self.options.block_size);
        let newest = |context: &Tensor| context.f_narrow(1, positions - seen, seen);
        self.context = newest(&self.context).doing("cutting the context off")?;
        let logits = forward(self.model, &self.context)?;
        let last = logits.f_get(0).and_then(|logits| logits.f_get(seen - 1));
        let logits = last.doing("reading the logits of the next token")?;
        let largest = logits.f_max().and_then(|largest| largest.f_double_value(&[]));
        let largest = largest.doing("reading the largest logit")?;
        if !largest.is_finite() {
            return Err(Error::data(format!(
                "the model's largest logit is {largest}, so there is nothing to draw from; use a checkpoint from before \
                 the training diverged"
            )));
        }
        let token = if self.options.temperature < SMALLEST_TEMPERATURE {
            logits.f_argmax(-1, false).doing("taking the likeliest token")?
        } else {
            self.draw_from(&logits)?
        };
        let append = || Tensor::f_cat(&[&self.context, &token.f_view([1, 1])?], 1);
        self.context = append().doing("appending a token")?;
        token.f_int64_value(&[]).doing("reading a token")
    }

    /// Draws from the probabilities of `logits`, of shape `[vocabulary]`, as `torch.multinomial` does.
    fn draw_from(&self, logits: &Tensor) -> Result<Tensor> {
        let doing = "drawing a token";
        let probabilities = self.probabilities(logits).doing(doing)?;
        let mut exponential = probabilities.f_empty_like().doing(doing)?;
        self.generator.exponential_(&mut exponential)?;
        let ratio = probabilities.f_div(&exponential);
        ratio.and_then(|ratio| ratio.f_argmax(-1, false)).doing(doing)
    }

    /// Returns the probability of each token, 0 for those that are not among the `top_k` likeliest.
    fn probabilities(&self, logits: &Tensor) -> Result<Tensor, TchError> {
        let GenerateOptions { temperature, top_k, .. } = self.options;
        let logits = logits.f_to_kind(Kind::Float)?.f_div_scalar(temperature)?;
        let Some(k) = top_k.filter(|&k| k < logits.size()[0]) else {
            return logits.f_softmax(-1, None);
        };
        let (largest, _) = logits.f_topk(k, -1, true, true)?;
        let is_smaller = logits.f_lt_tensor(&largest.f_get(k - 1)?)?;
        logits.f_masked_fill(&is_smaller, f64::NEG_INFINITY)?.f_softmax(-1, None)
    }
}

impl<M: Forward> Iterator for Generate<'_, M> {
    type Item = Result<i64>;

    fn next(&mut self) -> Option<Result<i64>> {
        Some(tch::no_grad(|| self.draw()))
    }
}

/// Returns the logits for `tokens`. A model of this crate unwinds with its error, because `Forward` returns none.
fn forward(model: &impl Forward, tokens: &Tensor) -> Result<Tensor> {
    catch_unwind(AssertUnwindSafe(|| model.forward_inputs(slice::from_ref(tokens), false))).map_err(
        |payload| match payload.downcast::<Error>() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        },
    )
}
