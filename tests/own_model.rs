//! Models of one's own in the trainer, with several inputs.

use std::sync::Arc;

use ddp_mp::prelude::*;
use tch::nn::{Linear, Module, VarStore};

use crate::harness::{linear, ranks, repository, try_ranks};

pub(crate) const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The inputs and the target of samples, from their numbers.
fn samples(indices: &[usize]) -> [Tensor; 3] {
    let numbers: Vec<f32> = indices.iter().map(|&index| index as f32 / 10.0).collect();
    let numbers = Tensor::from_slice(&numbers).unsqueeze(1);
    [numbers.sin(), Tensor::cat(&[numbers.cos(), &numbers * 0.1], 1), numbers * 0.2]
}

/// 20 samples with two tensors of inputs, or with one that has the columns of both.
#[derive(Debug)]
struct Pairs {
    in_one: bool,
}

impl Dataset for Pairs {
    fn len(&self) -> usize {
        20
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let [first, second, target] = samples(&[index]);
        let inputs = if self.in_one { Tensor::cat(&[first, second], 1) } else { first };
        Ok((inputs.squeeze_dim(0), target.squeeze_dim(0)))
    }

    fn more_inputs(&self, indices: &[usize]) -> anyhow::Result<Vec<Tensor>> {
        let [_, second, _] = samples(indices);
        Ok(if self.in_one { Vec::new() } else { vec![second] })
    }
}

#[test]
fn book_shows_the_signature_of_more_inputs() {
    let signature = "fn more_inputs(&self, indices: &[usize]) -> anyhow::Result<Vec<Tensor>> {";
    for file in
        ["docs/src/your-own-model.md", "crates/engine/src/data/dataset.rs", "tests/own_model.rs"]
    {
        assert!(std::fs::read_to_string(repository(file)).unwrap().contains(signature), "{file}");
    }
}

/// A layer for all inputs together.
#[derive(Debug)]
struct Joined(Linear);

impl Forward for Joined {
    fn forward_inputs(&self, inputs: &[Tensor], _train: bool) -> Tensor {
        self.0.forward(&Tensor::cat(inputs, 1))
    }
}

fn joined(vs: &VarStore) -> Model {
    Model::of(Joined(linear(vs.root(), 3, 1)))
}

/// The hash after two epochs on `dataset`, with 2 ranks.
fn hash_on(dataset: Arc<dyn Dataset>, workers: usize) -> u64 {
    let hashes = ranks(2, move |rank, group| {
        let vs = VarStore::new(rank.device());
        let ddp =
            DistributedDataParallel::new(joined(&vs), &vs, group.clone(), DdpOptions::default())?;
        let sgd: Box<dyn Optimizer> =
            Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
        let sampler = DistributedSampler::new(dataset.len(), 2, rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler.clone(), 3, rank.device())?;
        let loader = loader.num_workers(workers, 2, &group);
        let validation = DataLoader::new(dataset.clone(), sampler.uneven(), 3, rank.device())?;
        let mut trainer = Trainer::new(ddp, sgd, Schedule::constant(0.1), loader, Loss::Mse)?
            .validation(validation, 1);
        trainer.train(2)?;
        Ok(trainer.ddp().parameters_hash()?)
    });
    assert_eq!(hashes[0], hashes[1]);
    hashes[0]
}

#[test]
fn model_of_two_inputs_trains_as_one_of_their_columns() {
    let some: Vec<usize> = (0..20).filter(|index| index % 5 != 0).collect();
    for is_part in [false, true] {
        let dataset = |in_one| -> Arc<dyn Dataset> {
            let whole = Arc::new(Pairs { in_one });
            if is_part { Arc::new(Subset::new(whole, some.clone())) } else { whole }
        };
        let expected = hash_on(dataset(true), 0);
        for workers in [0, 2] {
            assert_eq!(hash_on(dataset(false), workers), expected, "{workers} workers");
        }
    }
}

#[test]
fn batch_without_samples_has_all_inputs() {
    ranks(3, |rank, _| {
        let dataset: Arc<dyn Dataset> =
            Arc::new(Subset::new(Arc::new(Pairs { in_one: false }), vec![4, 7]));
        let sampler = DistributedSampler::new(2, 3, rank.rank())?.without_padding().shuffle(false);
        let loader = DataLoader::new(dataset, sampler, 1, rank.device())?.in_step(true);
        let batches: Vec<Batch> = loader.epoch(0)?.collect::<Result<_, _>>()?;
        let [batch] = &batches[..] else { panic!("{batches:?}") };
        let len = i64::from(rank.rank() < 2);
        assert_eq!((batch.len() as i64, batch.inputs.size()), (len, vec![len, 1]));
        assert_eq!(batch.more_inputs.len(), 1);
        assert_eq!(batch.more_inputs[0].size(), [len, 2]);
        if len == 1 {
            let [_, second, _] = samples(&[[4, 7][rank.rank()]]);
            assert_eq!(batch.more_inputs[0], second);
        }
        Ok(())
    });
}

/// Returns fewer rows than samples.
#[derive(Debug)]
struct TooFew;

impl Dataset for TooFew {
    fn len(&self) -> usize {
        8
    }

    fn get(&self, _: usize) -> anyhow::Result<(Tensor, Tensor)> {
        Ok((Tensor::zeros([1], CPU), Tensor::zeros([1], CPU)))
    }

    fn more_inputs(&self, _: &[usize]) -> anyhow::Result<Vec<Tensor>> {
        Ok(vec![Tensor::zeros([1, 2], CPU)])
    }
}

#[test]
fn inputs_that_do_not_fit_are_one_error() {
    let dataset: Arc<dyn Dataset> = Arc::new(TooFew);
    let error = try_ranks(1, move |rank, _| {
        let sampler = DistributedSampler::new(dataset.len(), 2, rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, 4, rank.device())?;
        loader.epoch(0)?.next().transpose()?;
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the first input has 4 samples, and a further one has 1;"), "{error}");

    // A model of tch takes one tensor.
    let error = try_ranks(1, move |rank, group| {
        let vs = VarStore::new(rank.device());
        let model = linear(vs.root(), 1, 1);
        let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
        let inputs = [Tensor::zeros([1, 1], CPU), Tensor::zeros([1, 2], CPU)];
        let _ = ddp.forward_inputs(&inputs, true);
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("takes one tensor of inputs, and the batch has 2; implement"),
        "{error}"
    );
}

/// 20 samples of 3 inputs, with the sample's number as target.
pub(crate) fn numbers() -> TensorDataset {
    let targets = Tensor::arange(20, CPU).unsqueeze(1);
    let inputs = Tensor::cat(&[targets.sin(), targets.cos(), &targets * 0.1], 1);
    TensorDataset::new(inputs, targets).unwrap()
}
