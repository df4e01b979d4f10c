//! A small GPT: nanoGPT's shape, with its names and its initialisation.

use tch::nn::{Init, ModuleT, Path};
use tch::{Kind, TchError, Tensor};

use super::layers::{Parameters, default_bounds};
use super::{Architecture, Dropout, Layers, Model, ModelConfig, layer_output, or_throw};
use crate::ffi::TorchResult;

/// A decoder-only transformer over tokens.
pub(super) const GPT: Architecture = Architecture {
    keys: &["n_layer", "n_head", "n_embd", "block_size", "no_bias", "dropout"],
    check,
    num_parameters: |config| {
        let [vocabulary, context, layers, width] =
            [config.out_features, config.in_features, config.n_layer, config.n_embd]
                .map(|size| size as f64);
        let biases = if config.bias { 1.0 } else { 0.0 };
        // Two norms; four matrices of 3, 1, 4 and 4 times width x width, with as many biases as outputs.
        let block = 2.0 * (1.0 + biases) * width + 12.0 * width * width + biases * 9.0 * width;
        (vocabulary + context) * width + layers * block + (1.0 + biases) * width
    },
    build: |root, config, dropout| {
        let gpt = Gpt::new(root, config, dropout)?;
        gpt.draw_parameters(config)?;
        Ok(Model::new(gpt))
    },
};

/// The standard deviation of GPT-2's initial weights.
const STD: f64 = 0.02;

/// The layers of [`ModelKind::Gpt`](super::ModelKind::Gpt).
#[derive(Debug)]
struct Gpt {
    /// A row for each token: the embedding, and the weight of the last layer.
    wte: Tensor,
    /// A row for each position of the context.
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: Parameters,
    dropout: Option<Dropout>,
}

/// Attention and an mlp, each with a norm before and a sum with its input after.
#[derive(Debug)]
struct Block {
    heads: i64,
    ln_1: Parameters,
    c_attn: Parameters,
    attn_proj: Parameters,
    ln_2: Parameters,
    c_fc: Parameters,
    mlp_proj: Parameters,
}

impl Gpt {
    /// Creates the parameters, which [`draw_parameters`](Self::draw_parameters) fills, in the order of nanoGPT.
    fn new(root: &Path, config: &ModelConfig, dropout: Option<Dropout>) -> Result<Self, TchError> {
        let root = root / "transformer";
        let (width, bias) = (config.n_embd, config.bias);
        let embedding =
            |name, rows| (&root / name).f_var("weight", &[rows, width], Init::Const(0.0));
        let wte = embedding("wte", config.out_features)?;
        let wpe = embedding("wpe", config.in_features)?;
        let block = |number| Block::new(&(&root / "h" / number), config);
        let blocks = (0..config.n_layer).map(block).collect::<Result<_, _>>()?;
        let ln_f = Parameters::of_norm(&(&root / "ln_f"), width, bias)?;
        Ok(Self { wte, wpe, blocks, ln_f, dropout })
    }

    /// Draws the parameters from libtorch's generator, bit for bit as nanoGPT does. It draws PyTorch's default values
    /// first, and then replaces them by GPT-2's.
    fn draw_parameters(&self, config: &ModelConfig) -> Result<(), TchError> {
        let normal = |tensor: &Tensor, std| tensor.shallow_clone().f_normal_(0.0, std).map(drop);
        let uniform = |tensor: &Tensor, bound: f64| {
            tensor.shallow_clone().f_uniform_(-bound, bound).map(drop)
        };
        tch::no_grad(|| {
            normal(&self.wte, 1.0)?;
            normal(&self.wpe, 1.0)?;
            for Parameters { weight, bias } in self.linears() {
                let (weight_bound, bias_bound) = default_bounds(weight.size()[1]);
                uniform(weight, weight_bound)?;
                if let Some(bias) = &bias {
                    uniform(bias, bias_bound)?;
                }
            }
            // The last layer, before it shares the embedding's weight.
            uniform(&self.wte, default_bounds(config.n_embd).0)?;

            normal(&self.wte, STD)?;
            normal(&self.wpe, STD)?;
            for Parameters { weight, bias } in self.linears() {
                normal(weight, STD)?;
                if let Some(bias) = &bias {
                    bias.shallow_clone().f_zero_().map(drop)?;
                }
            }
            normal(&self.wte, STD)?; // again, as the last layer's weight
            // Each block adds two terms to its input. Smaller weights keep the sum of all terms in scale.
            let std = STD / (2.0 * config.n_layer as f64).sqrt();
            let terms = self.blocks.iter().flat_map(|block| [&block.attn_proj, &block.mlp_proj]);
            for term in terms {
                normal(&term.weight, std)?;
            }
            Ok(())
        })
    }

    /// Returns the dense layers of all blocks, in the order of creation.
    fn linears(&self) -> impl Iterator<Item = &Parameters> {
        self.blocks
            .iter()
            .flat_map(|block| [&block.c_attn, &block.attn_proj, &block.c_fc, &block.mlp_proj])
    }

    /// Returns the logits of the next token at each position, of shape batch x positions x vocabulary. `tokens` has
    /// the shape batch x positions.
    fn f_forward_t(&self, tokens: &Tensor, train: bool) -> Result<Tensor, TchError> {
        let dropout = self.dropout.as_ref().filter(|_| train);
        let positions = Tensor::f_arange(tokens.size()[1], (Kind::Int64, tokens.device()))?;
        let embed =
            |table: &Tensor, rows: &Tensor| Tensor::f_embedding(table, rows, -1, false, false);
        let sum = embed(&self.wte, tokens)?.f_add(&embed(&self.wpe, &positions)?)?;
        let mut x = dropped(sum, dropout);
        layer_output("transformer.drop", &x);
        for (index, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, dropout, index)?;
            layer_output(format_args!("transformer.h.{index}"), &x);
        }
        let x = self.ln_f.norm(&x)?;
        layer_output("transformer.ln_f", &x);
        let logits = x.f_linear(&self.wte, None::<&Tensor>)?;
        layer_output("lm_head", &logits);
        Ok(logits)
    }
}

impl Block {
    fn new(path: &Path, config: &ModelConfig) -> Result<Self, TchError> {
        let (width, bias) = (config.n_embd, config.bias);
        let linear =
            |path: &Path, inputs, outputs| Parameters::new(path, &[outputs, inputs], 0.0, bias);
        let (attn, mlp) = (path / "attn", path / "mlp");
        Ok(Self {
            heads: config.n_head,
            ln_1: Parameters::of_norm(&(path / "ln_1"), width, bias)?,
            c_attn: linear(&(&attn / "c_attn"), width, 3 * width)?,
            attn_proj: linear(&(&attn / "c_proj"), width, width)?,
            ln_2: Parameters::of_norm(&(path / "ln_2"), width, bias)?,
            c_fc: linear(&(&mlp / "c_fc"), width, 4 * width)?,
            mlp_proj: linear(&(&mlp / "c_proj"), 4 * width, width)?,
        })
    }

    /// `x` has the shape batch x positions x width, and so has the result.
    fn forward(
        &self,
        x: &Tensor,
        dropout: Option<&Dropout>,
        index: usize,
    ) -> Result<Tensor, TchError> {
        let done = |module: &str, output: &Tensor| {
            layer_output(format_args!("transformer.h.{index}.{module}"), output);
        };
        let normal = self.ln_1.norm(x)?;
        done("ln_1", &normal);
        let attended = self.attend(&normal, dropout)?;
        done("attn", &attended);
        let x = x.f_add(&attended)?;
        let normal = self.ln_2.norm(&x)?;
        done("ln_2", &normal);
        let hidden = self.c_fc.linear(&normal)?.f_gelu("none")?;
        let mixed = dropped(self.mlp_proj.linear(&hidden)?, dropout);
        done("mlp", &mixed);
        x.f_add(&mixed)
    }

    /// Returns causal self-attention: a position sees itself and those before it.
    fn attend(&self, x: &Tensor, dropout: Option<&Dropout>) -> Result<Tensor, TchError> {
        let [batch, positions, width] = x.size()[..] else {
            unreachable!("x has three dimensions")
        };
        let of_head = [batch, positions, self.heads, width / self.heads];
        let queries_keys_values = self.c_attn.linear(x)?.f_split(width, 2)?;
        let heads = queries_keys_values.iter().map(|all| all.f_view(of_head)?.f_transpose(1, 2));
        let [q, k, v] = &heads.collect::<Result<Vec<_>, _>>()?[..] else {
            unreachable!("c_attn has three times the width")
        };
        let mask = None::<&Tensor>;
        let seen = match dropout {
            None => Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, true, None, false)?,
            Some(dropout) => attend_with_dropout([q, k, v], dropout)?,
        };
        let seen = seen.f_transpose(1, 2)?.f_reshape([batch, positions, width])?;
        Ok(dropped(self.attn_proj.linear(&seen)?, dropout))
    }
}

/// Returns causal attention with dropout from the rank's generator. libtorch's own would draw from a generator that
/// ranks share.
fn attend_with_dropout([q, k, v]: [&Tensor; 3], dropout: &Dropout) -> Result<Tensor, TchError> {
    let (positions, width) = (q.size()[2], q.size()[3]);
    let scaled = q.f_mul_scalar(1.0 / (width as f64).sqrt())?; // before the product, which float16 could not hold
    let scores = scaled.f_matmul(&k.f_transpose(-2, -1)?)?;
    let is_later = Tensor::f_ones([positions, positions], (Kind::Bool, q.device()))?.f_triu(1)?;
    let weights = scores.f_masked_fill(&is_later, f64::NEG_INFINITY)?.f_softmax(-1, None)?;
    dropout.forward_t(&weights, true).f_matmul(v)
}

/// Applies `dropout`, if any, in training.
fn dropped(x: Tensor, dropout: Option<&Dropout>) -> Tensor {
    match dropout {
        Some(dropout) => dropout.forward_t(&x, true),
        None => x,
    }
}

impl Parameters {
    /// Creates a weight of the shape `shape`, all of whose numbers are `value`, and a bias of zeros.
    fn new(path: &Path, shape: &[i64], value: f64, bias: bool) -> Result<Self, TchError> {
        let weight = path.f_var("weight", shape, Init::Const(value))?;
        let zeros = || path.f_var("bias", &shape[..1], Init::Const(0.0));
        Ok(Self { weight, bias: bias.then(zeros).transpose()? })
    }

    /// Creates the parameters of a norm over `width` numbers.
    fn of_norm(path: &Path, width: i64, bias: bool) -> Result<Self, TchError> {
        Self::new(path, &[width], 1.0, bias)
    }

    fn linear(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_linear(&self.weight, self.bias.as_ref())
    }

    fn norm(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_layer_norm(&self.weight.size()[..], Some(&self.weight), self.bias.as_ref(), 1e-5, true)
    }
}

impl Layers for Gpt {
    fn dropout(&mut self) -> Option<&mut Dropout> {
        self.dropout.as_mut()
    }
}

impl ModuleT for Gpt {
    fn forward_t(&self, tokens: &Tensor, train: bool) -> Tensor {
        or_throw(self.f_forward_t(tokens, train).doing("gpt"))
    }
}

fn check(config: &ModelConfig) -> Result<(), (&'static str, String)> {
    let ModelConfig { n_layer, n_head, n_embd, in_features, out_features, .. } = *config;
    let sizes = [
        ("n_layer", n_layer),
        ("n_head", n_head),
        ("n_embd", n_embd),
        ("block_size", in_features),
        ("out_features", out_features),
    ];
    if let Some((key, size)) = sizes.into_iter().find(|(_, size)| *size < 1) {
        return Err((key, format!("{size} is too small; use 1 or more")));
    }
    if n_embd % n_head != 0 {
        let problem = format!(
            "{n_head} heads cannot share a width of {n_embd} equally; use an --n-embd that is a multiple of --n-head"
        );
        return Err(("n_head", problem));
    }
    Ok(())
}
