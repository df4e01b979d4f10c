//! What is in each parameter's `grad`, as PyTorch has it: unused and ignored parameters, retained graphs, two models.

use std::process::Command;
use std::rc::Rc;

use ddp_mp::ddp::{BackwardOptions, hook_fn};
use ddp_mp::{DdpOptions, DistributedDataParallel, Optimizer, ProcessGroup, Rank, Sgd, SgdOptions};
use serde::Deserialize;
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{linear, ranks, try_ranks, wrapped};
use crate::parity::{Values, flat, recorded};
use crate::shared::power_sgd::{PowerSgd, PowerSgdOptions};

/// Caps that give every parameter a bucket of its own.
const TINY: f64 = 1e-9;

/// What record.py's `gradients` has recorded of one sequence of backwards.
#[derive(Deserialize, Clone)]
struct Case {
    name: String,
    world_size: usize,
    steps: Vec<Step>,
    /// After each backward, for each rank: the first number of each gradient.
    after: Vec<Vec<Vec<Option<f64>>>>,
}

#[derive(Deserialize, Clone)]
struct Step {
    zero: bool,
    no_sync: bool,
    unused: String,
    last_rank_unused: String,
}

fn cases() -> Vec<Case> {
    let cases: Vec<Case> =
        serde_json::from_value(recorded("gradients.json")["cases"].clone()).unwrap();
    assert!(cases.len() > 20);
    cases
}

/// record.py's model: parameters a, b and c, and a sum of some of their squares.
struct Terms([Tensor; 3]);

impl Terms {
    /// Returns it, wrapped.
    fn wrapped(
        group: &Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> ddp_mp::Result<(VarStore, Self, DistributedDataParallel<()>)> {
        let vs = VarStore::new(Device::Cpu);
        let terms = ["a", "b", "c"].map(|name| vs.root().var(name, &[3], nn::Init::Const(1.)));
        let ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
        Ok((vs, Self(terms), ddp))
    }

    fn loss(&self, uses: impl Fn(char) -> bool, factor: f64) -> Tensor {
        let terms = ['a', 'b', 'c'].into_iter().zip(&self.0).zip(1..);
        let used = terms.filter(|((name, _), _)| uses(*name));
        used.map(|((_, it), number)| (it.square() * f64::from(number)).sum(Kind::Float) * factor)
            .reduce(|a, b| a + b)
            .expect("one is used")
    }

    fn gradients(&self) -> Vec<Option<f64>> {
        let first = |it: &Tensor| it.grad().defined().then(|| it.grad().double_value(&[0]));
        self.0.iter().map(first).collect()
    }
}

fn assert_close(found: &[Option<f64>], expected: &[Option<f64>], what: &str) {
    let close = |(a, b): (&Option<f64>, &Option<f64>)| match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-6 * b.abs(),
        (a, b) => a == b,
    };
    assert!(found.iter().zip(expected).all(close), "{what}: {found:?}, PyTorch {expected:?}");
}

#[test]
fn gradients_after_several_backwards_match_pytorch() {
    for case in cases().into_iter().filter(|case| !case.steps.is_empty()) {
        for (overlap, mb) in [(None, 25.), (Some(true), TINY), (Some(false), TINY)] {
            let case = case.clone();
            ranks(case.world_size, move |rank, group| {
                let options = DdpOptions {
                    find_unused_parameters: true,
                    bucket_cap_mb_list: vec![mb],
                    overlap,
                    ..DdpOptions::default()
                };
                let (_, terms, mut ddp) = Terms::wrapped(&group, options)?;
                let is_last = rank.rank() + 1 == rank.world_size();
                let mut before = Vec::new();
                for (number, step) in case.steps.iter().enumerate() {
                    if step.zero {
                        ddp.zero_grad()?;
                    }
                    let is_unused = |name| {
                        step.unused.contains(name)
                            || (is_last && step.last_rank_unused.contains(name))
                    };
                    let factor = (rank.rank() + 1) as f64 / 8. * 3f64.powi(number as i32);
                    let no_sync = step.no_sync.then(|| ddp.no_sync());
                    ddp.backward(&terms.loss(|name| !is_unused(name), factor))?;
                    drop(no_sync);
                    let found = terms.gradients();
                    let what =
                        format!("`{}`, {} ranks, backward {number}", case.name, case.world_size);
                    assert_close(&found, &case.after[number][rank.rank()], &what);
                    // What no rank uses stays as it is, to the bit.
                    let stays = !step.zero && !step.no_sync;
                    for (index, name) in ['a', 'b', 'c'].into_iter().enumerate() {
                        if stays && step.unused.contains(name) && !case.steps[number - 1].no_sync {
                            assert_eq!(found[index], before[index] as Option<f64>, "{what}");
                        }
                    }
                    before = found;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn optimizer_steps_with_a_gradient_of_an_earlier_backward() {
    ranks(2, |_, group| {
        let options = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
        let (_, terms, mut ddp) = Terms::wrapped(&group, options)?;
        let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
        ddp.backward(&terms.loss(|name| name != 'c', 0.5))?;
        ddp.backward(&terms.loss(|name| name == 'a', 0.5))?;
        optimizer.step(0.25)?;
        let values = terms.0.each_ref().map(|it| it.double_value(&[0]));
        assert_eq!(values, [1. - 0.25 * 2., 1. - 0.25 * 2., 1.]);
        ddp.zero_grad()?;
        ddp.backward(&terms.loss(|name| name == 'c', 0.5))?;
        optimizer.step(0.25)?;
        assert_eq!(terms.0[1].double_value(&[0]), 0.5, "it has no gradient any more");
        Ok(())
    });
}

#[test]
fn retained_graph_averages_again() {
    let of = |name: &'static str| cases().into_iter().filter(move |case| case.name == name);
    for case in of("retain_graph") {
        ranks(case.world_size, move |rank, group| {
            let options = DdpOptions { bucket_cap_mb_list: vec![TINY], ..DdpOptions::default() };
            let (_, terms, mut ddp) = Terms::wrapped(&group, options)?;
            let loss = terms.loss(|_| true, (rank.rank() + 1) as f64 / 8.);
            // The first one also puts the buckets together anew.
            for (number, retain_graph) in [true, false].into_iter().enumerate() {
                ddp.backward_with(&loss, BackwardOptions { retain_graph })?;
                let what = format!("{} ranks, backward {number}", case.world_size);
                assert_close(&terms.gradients(), &case.after[number][rank.rank()], &what);
            }
            let error = ddp.backward(&loss).unwrap_err().to_string();
            assert!(error.contains("retain_graph"), "{error}");
            Ok(())
        });
    }
    // Why this does not follow PyTorch where there is no forward between them: its ranks part.
    for case in of("retain_graph, no forward").filter(|case| case.world_size > 1) {
        assert_ne!(case.after[1][0], case.after[1][1]);
    }
}

/// What record.py's `models` has recorded.
#[derive(Deserialize, Clone)]
struct Models {
    batch: i64,
    noise: i64,
    hidden: i64,
    sample: i64,
    steps: u64,
    lr: f64,
    cases: Vec<ModelsCase>,
}

#[derive(Deserialize, Clone)]
struct ModelsCase {
    name: String,
    world_size: usize,
    initial: [Values; 2],
    losses: Vec<f64>,
    r#final: [Values; 2],
}

/// Two linear layers with a tanh between them, as record.py has them.
struct Layers {
    layers: [nn::Linear; 2],
    /// Its parameters by name.
    tensors: Vec<(String, Tensor)>,
}

impl Layers {
    fn new(path: &nn::Path, widths: [i64; 3], values: &Values) -> Self {
        let mut tensors = Vec::new();
        let mut layer = |name: &str, from: i64, to: i64| {
            let layer = linear(path / name, from, to);
            for (key, tensor) in [("weight", Some(&layer.ws)), ("bias", layer.bs.as_ref())] {
                let name = format!("{name}.{key}");
                let tensor = tensor.expect("both are there");
                let values = Tensor::from_slice(&values[&name]).view_as(tensor);
                tch::no_grad(|| tensor.shallow_clone().copy_(&values));
                tensors.push((name, tensor.shallow_clone()));
            }
            layer
        };
        let [first, second, third] = widths;
        let layers = [layer("0", first, second), layer("2", second, third)];
        Self { layers, tensors }
    }

    fn forward(&self, inputs: &Tensor) -> Tensor {
        inputs.apply(&self.layers[0]).tanh().apply(&self.layers[1])
    }

    /// Sets whether a backward computes gradients of its parameters.
    fn set_requires_grad(&self, requires_grad: bool) {
        for (_, tensor) in &self.tensors {
            let _ = tensor.set_requires_grad(requires_grad);
        }
    }

    /// How far the values are from what was recorded.
    fn distance_to(&self, values: &Values) -> f32 {
        let of_tensor = |(name, tensor): &(String, Tensor)| {
            let (found, expected) = (flat(tensor), &values[name]);
            assert_eq!(found.len(), expected.len());
            found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max)
        };
        self.tensors.iter().map(of_tensor).fold(0., f32::max)
    }
}

/// Trains the two models of `case`. Those of a GAN are wrapped one by one: the discriminator is frozen while the generator
/// learns. Two parts of one model have one wrapper.
fn train_two(
    rank: &Rank,
    group: &Rc<ProcessGroup>,
    settings: &Models,
    case: &ModelsCase,
    options: &DdpOptions,
) -> anyhow::Result<Vec<u64>> {
    let Models { batch, noise, hidden, sample, steps, lr, .. } = *settings;
    let waves = |step: f64, columns: i64| {
        let numbers = Tensor::arange(batch * columns, (Kind::Double, Device::Cpu)) * 0.71;
        let waves = (numbers + rank.rank() as f64 * 5.3 + step).sin();
        waves.to_kind(Kind::Float).view([batch, columns])
    };
    let mean_square = |from: &Tensor| from.square().mean(Kind::Float);
    let is_gan = case.name == "gan";
    let stores: Vec<VarStore> =
        (0..if is_gan { 2 } else { 1 }).map(|_| VarStore::new(Device::Cpu)).collect();
    let path = |model: usize| stores[model % stores.len()].root() / model;
    let g = Layers::new(&path(0), [noise, hidden, sample], &case.initial[0]);
    let d = Layers::new(&path(1), [sample, hidden, 1], &case.initial[1]);
    let wrap = |vs| {
        let model = DistributedDataParallel::new((), vs, group.clone(), options.clone())?;
        let optimizer = Sgd::new(model.flat_buffers(), SgdOptions::default())?;
        Ok::<_, anyhow::Error>((model, optimizer))
    };
    let mut wrapped = stores.iter().map(wrap).collect::<Result<Vec<_>, _>>()?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let noise = waves(step as f64, noise);
        let (generator, optimizer) = &mut wrapped[0];
        d.set_requires_grad(!is_gan);
        generator.zero_grad()?;
        let loss = mean_square(&(d.forward(&g.forward(&noise)) - 1.));
        generator.backward(&loss)?;
        losses.push(loss.double_value(&[]));
        optimizer.step(lr)?;
        d.set_requires_grad(true);
        if let Some((discriminator, optimizer)) = wrapped.get_mut(1) {
            discriminator.zero_grad()?;
            let real = mean_square(&(d.forward(&waves(step as f64 + 0.5, sample)) - 1.));
            let loss = real + mean_square(&d.forward(&g.forward(&noise).detach()));
            discriminator.backward(&loss)?;
            losses.push(loss.double_value(&[]));
            optimizer.step(lr)?;
        }
    }
    let what = format!("{}, {} ranks", case.name, case.world_size);
    if rank.rank() == 0 {
        let theirs = &case.losses;
        let close = losses.iter().zip(theirs).all(|(found, it)| (found - it).abs() < 1e-5);
        assert!(close && losses.len() == theirs.len(), "{what}: {losses:?}, PyTorch {theirs:?}");
    }
    for (layers, expected) in [&g, &d].into_iter().zip(&case.r#final) {
        let distance = layers.distance_to(expected);
        assert!(distance < 1e-5, "{what}: {distance} from PyTorch's");
    }
    Ok(wrapped.iter().map(|(model, _)| model.parameters_hash()).collect::<Result<_, _>>()?)
}

#[test]
fn two_models_are_trained_as_in_pytorch() {
    let settings: Models = serde_json::from_value(recorded("models.json")).unwrap();
    assert_eq!(settings.cases.len(), 6);
    for case in settings.cases.clone() {
        let mut hashes = Vec::new();
        for (overlap, mb) in
            [(None, 25.), (Some(true), TINY), (Some(true), 100e-6), (Some(false), TINY)]
        {
            let options =
                DdpOptions { overlap, bucket_cap_mb_list: vec![mb], ..DdpOptions::default() };
            let (settings, case) = (settings.clone(), case.clone());
            hashes.extend(ranks(case.world_size, move |rank, group| {
                train_two(rank, &group, &settings, &case, &options)
            }));
        }
        assert!(hashes.iter().all(|one| *one == hashes[0]), "on all ranks: {hashes:?}");
    }
}

#[test]
fn backward_into_another_ddp_model_is_refused() {
    ranks(2, |rank, group| {
        let wrap = |init| {
            let vs = VarStore::new(rank.device());
            let weight = vs.root().var("weight", &[2], nn::Init::Const(init));
            let options = DdpOptions::default();
            let ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
            Ok::<_, anyhow::Error>((weight, ddp))
        };
        let ((g, mut generator), (d, mut discriminator)) = (wrap(3.)?, wrap(5.)?);
        let loss = || (&g * &d).sum(Kind::Float) * (rank.rank() as f64 + 1.);
        let error = generator.backward(&loss()).unwrap_err().to_string();
        let told = "wrap them as one, with one VarStore, or call set_requires_grad(false)";
        assert!(error.contains(told), "{error}");
        // Nothing is left of it.
        generator.zero_grad()?;
        discriminator.zero_grad()?;
        let _ = d.set_requires_grad(false);
        generator.backward(&loss())?;
        assert_eq!(g.grad().double_value(&[0]), 7.5);
        Ok(())
    });
}

#[test]
fn ignored_parameters_and_buffers_stay_local() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let root = vs.root();
        let own = rank.rank() as f64 + 1.;
        // Not even of the same shape.
        let mine = (&root / "adapter").var("mine", &[rank.rank() as i64 + 1], nn::Init::Const(own));
        let shared = root.var("shared", &[2], nn::Init::Const(own));
        let buffer = root.zeros_no_train("buffer", &[2]);
        let _ = tch::no_grad(|| buffer.shallow_clone().fill_(own));
        let ignore = ["adapter.mine", "buffer"].map(String::from).to_vec();
        let options = DdpOptions { ignore, ..DdpOptions::default() };
        let mut ddp = DistributedDataParallel::new((), &vs, group, options)?;
        assert_eq!(ddp.num_parameters(), 2);
        assert_eq!(ddp.flat_buffers().iter().map(|it| it.layout.get().len()).sum::<usize>(), 1);
        for _ in 0..2 {
            ddp.zero_grad()?;
            assert!(!mine.grad().defined(), "zero_grad is for all");
            ddp.backward(&((&mine * own).sum(Kind::Float) + (&shared * own).sum(Kind::Float)))?;
            assert_eq!(mine.grad().double_value(&[0]), own, "not averaged");
            assert_eq!(shared.grad().double_value(&[0]), 1.5);
        }
        assert_eq!(mine.double_value(&[0]), own, "not copied from rank 0");
        assert_eq!(buffer.double_value(&[0]), own);
        assert_eq!(shared.double_value(&[0]), 1.);
        let names: Vec<String> = ddp.state_dict().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["adapter.mine", "shared", "buffer"], "still part of the model");
        Ok(())
    });
}

#[test]
fn unknown_or_complete_ignore_list_is_refused() {
    let wrap = |ignore: &'static [&'static str]| {
        let error = try_ranks(2, move |_, group| {
            let ignore = ignore.iter().map(|name| (*name).into()).collect();
            let options = DdpOptions { ignore, ..DdpOptions::default() };
            Ok(wrapped(&group, ["weight"], &[2], options).map(drop)?)
        });
        error.unwrap_err().to_string()
    };
    let error = wrap(&["weigth"]);
    assert!(error.contains("ignore: the model has no parameter or buffer `weigth`"), "{error}");
    let error = wrap(&["weight"]);
    assert!(error.contains("no parameters to train"), "{error}");
}

#[test]
fn second_comm_hook_is_refused() {
    ranks(1, |_, group| {
        let (_, mut ddp) = wrapped(&group, ["weight"], &[2], DdpOptions::default())?;
        let hook = |name| hook_fn(name, |_, _| Ok(()));
        ddp.register_comm_hook(hook("first"))?;
        let error = ddp.register_comm_hook(hook("second")).unwrap_err().to_string();
        assert!(error.contains("`second` cannot be registered: `first` is"), "{error}");
        Ok(())
    });
}

/// Low-rank factors replace the matrices on the way; only vectors such as biases are sent as they are.
#[test]
fn power_sgd_sends_a_fraction_of_the_bytes() {
    ranks(2, |_, group| {
        let sent = |compresses: bool| {
            let vs = VarStore::new(Device::Cpu);
            let model = linear(vs.root(), 256, 256);
            let options = DdpOptions::default();
            let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
            if compresses {
                let options = PowerSgdOptions { start_iter: 0, ..PowerSgdOptions::default() };
                ddp.register_comm_hook(Box::new(PowerSgd::new(options)))?;
            }
            let before = group.traffic().sent;
            for _ in 0..3 {
                ddp.zero_grad()?;
                let inputs = Tensor::ones([4, 256], (Kind::Float, Device::Cpu));
                ddp.backward(&ddp.forward(&inputs).square().mean(Kind::Float))?;
            }
            anyhow::Ok(group.traffic().sent - before)
        };
        let (all, factors) = (sent(false)?, sent(true)?);
        assert!(factors * 20 < all, "{factors} of {all} bytes");
        Ok(())
    });
}

/// Trains a small model with an optimizer of tch's.
fn with_tch_s_optimizer(zero_grad_of_optimizer: bool) -> Vec<Vec<f32>> {
    ranks(2, move |rank, group| {
        let (vs, terms, mut ddp) = Terms::wrapped(&group, DdpOptions::default())?;
        let mut optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&vs, 0.1)?;
        for step in 0..5 {
            if zero_grad_of_optimizer {
                optimizer.zero_grad();
            } else {
                ddp.zero_grad()?;
            }
            ddp.backward(&terms.loss(|_| true, (rank.rank() + step) as f64 / 8.))?;
            optimizer.step();
        }
        Ok(Vec::<f32>::try_from(Tensor::cat(&terms.0.each_ref().map(Tensor::detach), 0))?)
    })
}

#[test]
fn zero_grad_of_tch_optimizers_has_the_same_result() {
    let ours = with_tch_s_optimizer(false);
    assert_eq!(ours[0], ours[1]);
    assert_eq!(with_tch_s_optimizer(true), ours);
}

#[test]
fn backward_step_of_tch_is_refused_with_the_remedy() {
    let error = try_ranks(2, |_, group| {
        let (vs, terms, _ddp) = Terms::wrapped(&group, DdpOptions::default())?;
        let optimizer = nn::Sgd::default().build(&vs, 0.1)?;
        step_as_without_ddp(optimizer, &terms.loss(|_| true, 1.));
        Ok(())
    })
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("failed in its function: panicked"), "{text}");
    assert!(names_this_file(&text, "step_as_without_ddp"), "{text}");
    assert!(text.contains(": backward reached a parameter"), "{text}");
    assert!(text.contains("call ddp.backward instead of"), "{text}");
}

#[inline(never)] // its name is looked for
fn step_as_without_ddp(mut optimizer: nn::Optimizer, loss: &Tensor) {
    optimizer.backward_step(loss);
}

#[inline(never)] // its name is looked for
fn forward_of_a_wrong_shape(ddp: &DistributedDataParallel<nn::Linear>) {
    let _ = ddp.forward(&Tensor::ones([2, 5], (Kind::Float, Device::Cpu)));
}

/// Whether `text` names a line of this file, or a function of it where the binary has no lines.
fn names_this_file(text: &str, function: &str) -> bool {
    text.contains("tests/gradients.rs:") || text.contains(&format!("gradients::{function}"))
}

#[test]
fn wrong_shape_error_has_the_user_line_and_no_frames() {
    const NAME: &str = "wrong_shape_error_has_the_user_line_and_no_frames";
    if std::env::var_os("WRONG_SHAPE").is_some() {
        // In the process that the other half of this test starts.
        let result = try_ranks(2, |rank, group| {
            let vs = VarStore::new(rank.device());
            let model = linear(vs.root(), 4, 3);
            let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
            forward_of_a_wrong_shape(&ddp);
            Ok(())
        });
        panic!("{}", result.unwrap_err());
    }
    let stderr = |backtrace: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("gradients::{NAME}"), "--nocapture"]);
        let output = command.env("RUST_BACKTRACE", backtrace).env("WRONG_SHAPE", "1").output();
        let output = output.unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let text = stderr("0");
    let told = text.lines().find(|line| line.contains("mat1 and mat2")).unwrap();
    assert!(told.contains("(CPU:") && names_this_file(told, "forward_of_a_wrong_shape"), "{told}");
    assert!(told.ends_with(": mat1 and mat2 shapes cannot be multiplied (2x5 and 4x3)"), "{told}");
    for noise in ["frame #", "thread 'rank", "Result::unwrap"] {
        assert!(!text.contains(noise), "{noise}: {text}");
    }
    assert!(stderr("1").contains("frame #"), "they are there when asked for");
}
