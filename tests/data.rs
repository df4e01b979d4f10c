//! Loaders: every sample in its turn, whatever the number of workers, and no worker that is waited for in vain.

use std::rc::Rc;
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, unbounded};
use ddp_mp::data::{DatasetSpec, FileDataset, TargetKind};
use ddp_mp::models::{ModelConfig, ModelKind};
use ddp_mp::{
    Autocast, Batch, DataLoader, Dataset, DdpOptions, DistributedDataParallel, DistributedSampler,
    Error, InputKind, Optimizer, ProcessGroup, Rank, Sgd, SgdOptions, Targets, TensorDataset,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tch::{Device, Kind, Reduction, Tensor};

use crate::harness::{ranks, try_ranks};

/// Sample `i` is the number `i` twice, and its target `10 i`. What happens at some of them is up to `at`.
#[derive(Debug)]
struct Numbers {
    len: usize,
    at: fn(usize) -> anyhow::Result<()>,
}

impl Dataset for Numbers {
    fn len(&self) -> usize {
        self.len
    }
    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        (self.at)(index)?;
        let index = index as f32;
        Ok((Tensor::from_slice(&[index, index]), Tensor::from_slice(&[10. * index])))
    }
}

fn in_memory(len: usize) -> TensorDataset {
    let numbers = Tensor::arange(len as i64, (Kind::Float, Device::Cpu)).unsqueeze(1);
    TensorDataset::new(Tensor::cat(&[&numbers, &numbers], 1), numbers * 10).unwrap()
}

/// The numbers in a batch, which its inputs and targets must agree on.
fn numbers(batch: &Batch) -> Vec<usize> {
    let column = |tensor: Tensor| Vec::<f32>::try_from(tensor).unwrap();
    let first = column(batch.inputs.select(1, 0));
    let len = batch.len() as i64;
    assert_eq!((batch.inputs.size(), batch.targets.size()), (vec![len, 2], vec![len, 1]));
    assert_eq!(first, column(batch.inputs.select(1, 1)));
    for tensor in [&batch.inputs, &batch.targets] {
        assert!((tensor.data_ptr() as usize).is_multiple_of(64), "as a new tensor");
    }
    let tenfold: Vec<f32> = first.iter().map(|x| 10. * x).collect();
    assert_eq!(tenfold, column(batch.targets.select(1, 0)));
    first.into_iter().map(|x| x as usize).collect()
}

fn loader(
    dataset: Arc<dyn Dataset>,
    batch_size: usize,
    workers: usize,
    rank: &Rank,
    group: &Rc<ProcessGroup>,
) -> ddp_mp::Result<DataLoader> {
    let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
    Ok(DataLoader::new(dataset, sampler, batch_size, rank.device())?.num_workers(workers, 2, group))
}

#[test]
fn loader_follows_the_sampler_with_any_number_of_workers() {
    let mut runner =
        TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    let cases = (1..200usize, 1..4usize, 1..40usize, 0..4usize, any::<bool>(), any::<bool>());
    runner
        .run(&cases, |(len, world_size, batch_size, workers, by_get, drop_last)| {
            let dataset: Arc<dyn Dataset> = if by_get {
                Arc::new(Numbers { len, at: |_| Ok(()) })
            } else {
                Arc::new(in_memory(len))
            };
            ranks(world_size, move |rank, group| {
                let loader = loader(dataset.clone(), batch_size, workers, rank, &group)?;
                let loader = loader.drop_last(drop_last).pin_memory(&group)?; // nothing, on the CPU
                for epoch in [0, 3] {
                    let sampler = DistributedSampler::new(len, world_size, rank.rank())?;
                    let mut expected: Vec<Vec<usize>> =
                        sampler.indices(epoch)?.chunks(batch_size).map(<[_]>::to_vec).collect();
                    if drop_last {
                        expected.retain(|batch| batch.len() == batch_size);
                    }
                    assert_eq!(loader.num_batches(), expected.len());
                    let found = loader.epoch(epoch)?.map(|batch| Ok(numbers(&batch?)));
                    assert_eq!(found.collect::<ddp_mp::Result<Vec<_>>>()?, expected);
                }
                Ok(())
            });
            Ok(())
        })
        .unwrap();
}

#[test]
fn dataset_larger_than_a_block_is_loaded_whole() {
    // 40 MB: ten blocks of what is gathered at a time.
    let (len, width) = (10_000, 1000);
    let numbers = Tensor::arange(len, (Kind::Float, Device::Cpu)).unsqueeze(1);
    let inputs = numbers.expand([len, width], false).contiguous();
    let dataset: Arc<dyn Dataset> = Arc::new(TensorDataset::new(inputs, numbers).unwrap());
    ranks(1, move |rank, _| {
        let sampler = DistributedSampler::new(len as usize, 1, 0)?;
        let indices = sampler.indices(0)?;
        let loader = DataLoader::new(dataset.clone(), sampler, 64, rank.device())?;
        let mut found = Vec::new();
        for batch in loader.epoch(0)? {
            let batch = batch?;
            assert_eq!(batch.inputs.select(1, width - 1), batch.targets.select(1, 0));
            found.extend(Vec::<f32>::try_from(batch.targets.select(1, 0))?);
        }
        assert!(found.iter().map(|x| *x as usize).eq(indices));
        Ok(())
    });
}

/// Trains on the batches of an epoch after the first `steps` steps, whose parameters are `from`. Returns the parameters
/// after each step.
fn train_after(
    steps: usize,
    from: Option<&[Tensor]>,
    config: &ModelConfig,
    loader: &DataLoader,
    group: &Rc<ProcessGroup>,
) -> anyhow::Result<Vec<Vec<Tensor>>> {
    let (vs, model) = config.build(Device::Cpu, 0)?;
    let parameters = vs.trainable_variables();
    for (parameter, value) in parameters.iter().zip(from.unwrap_or_default()) {
        tch::no_grad(|| parameter.shallow_clone().copy_(value));
    }
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    let mut after = Vec::new();
    for batch in loader.epoch_from(0, steps * loader.batch_size() * group.world_size())? {
        let batch = batch?;
        ddp.zero_grad()?;
        let loss = ddp.forward(&batch.inputs).mse_loss(&batch.targets, Reduction::Mean);
        ddp.backward(&loss)?;
        optimizer.step(0.05)?;
        after.push(parameters.iter().map(|parameter| parameter.detach_copy()).collect());
    }
    Ok(after)
}

/// Long: it trains models of eleven widths with batches of seven sizes.
#[test]
fn run_resumed_at_any_step_has_the_bits_of_new_tensors() {
    const WIDTHS: [i64; 11] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 21, 33];
    const BATCHES: [usize; 7] = [1, 2, 3, 5, 7, 9, 33];
    for world_size in 1..=3 {
        ranks(world_size, move |rank, group| {
            for (number, width) in WIDTHS.into_iter().enumerate() {
                // More ranks have the same loaders: a part of the sizes is enough.
                for &batch in BATCHES.iter().skip(number % world_size).step_by(world_size) {
                    let samples = (world_size * 5 * batch - batch / 2) as i64;
                    let data = TensorDataset::random(samples, width, Targets::Values(4), 1)?;
                    let data: Arc<dyn Dataset> = Arc::new(data);
                    let loaders = [0, 1].map(|it| loader(data.clone(), batch, it, rank, &group));
                    let [without_workers, with_workers] = loaders;
                    let (without_workers, with_workers) = (without_workers?, with_workers?);
                    for kind in [ModelKind::Linear, ModelKind::Mlp] {
                        let config = ModelConfig {
                            kind,
                            in_features: width,
                            out_features: 4,
                            hidden: if kind == ModelKind::Mlp { vec![13] } else { Vec::new() },
                            ..ModelConfig::default()
                        };
                        let train = |steps, from: Option<&[Tensor]>, loader| {
                            train_after(steps, from, &config, loader, &group)
                        };
                        // A worker makes a new tensor for each batch, as PyTorch does.
                        let expected = train(0, None, &with_workers)?;
                        assert_eq!(train(0, None, &without_workers)?, expected, "{width} {batch}");
                        for steps in 1..expected.len() {
                            let from = Some(&expected[steps - 1][..]);
                            let rest = train(steps, from, &without_workers)?;
                            assert_eq!(rest, expected[steps..], "{kind:?} {width} {batch} {steps}");
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn failure_of_a_data_set_is_one_of_its_rank_and_names_the_samples() {
    type At = fn(usize) -> anyhow::Result<()>;
    let no_file: At = |index| if index == 7 { anyhow::bail!("no such file") } else { Ok(()) };
    let panics: At = |index| if index == 7 { panic!("on purpose") } else { Ok(()) };
    let cases = [
        (0, no_file, "loading data (samples ", ["7", ""], "no such file"),
        (2, no_file, "loading data (samples ", ["7", ""], "no such file"),
        (2, panics, "", ["panicked", "on purpose"], ""),
    ];
    for (workers, at, start, words, end) in cases {
        let run = try_ranks(2, move |rank, group| {
            let dataset = Arc::new(Numbers { len: 40, at });
            for batch in loader(dataset, 3, workers, rank, &group)?.epoch(0)? {
                batch?;
            }
            group.barrier()?;
            Ok(())
        });
        let message = run.unwrap_err().failure.error.clone();
        assert!(message.starts_with(start) && message.ends_with(end), "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
}

/// Tells when a sample is asked for, and gives it when it is told to.
#[derive(Debug)]
struct Gate {
    asked: Sender<()>,
    opens: Receiver<()>,
}

impl Dataset for Gate {
    fn len(&self) -> usize {
        4
    }
    fn get(&self, _: usize) -> anyhow::Result<(Tensor, Tensor)> {
        self.asked.send(())?;
        self.opens.recv()?;
        anyhow::bail!("nobody wants it any more")
    }
}

#[test]
fn wait_for_a_worker_ends_when_another_rank_fails() {
    let ((asked, is_asked), (open, opens)) = (unbounded(), unbounded());
    let run = try_ranks(2, move |rank, group| {
        if rank.rank() == 1 {
            is_asked.recv()?;
            anyhow::bail!("the cause");
        }
        let dataset = Arc::new(Gate { asked: asked.clone(), opens: opens.clone() });
        let mut batches = loader(dataset, 1, 1, rank, &group)?.epoch(0)?;
        let batch = batches.next().transpose();
        open.send(())?; // only now can the worker go on
        batch.map(drop)?;
        Ok(())
    });
    let error = run.unwrap_err();
    assert_eq!((error.failure.rank, &error.failure.error[..]), (1, "the cause"), "{error}");
    assert!(error.also_failed.is_empty(), "{error}");
}

#[test]
fn epoch_dropped_early_ends_its_workers() {
    ranks(1, |rank, group| {
        let dataset: Arc<dyn Dataset> = Arc::new(Numbers { len: 1000, at: |_| Ok(()) });
        let loader = loader(dataset.clone(), 10, 3, rank, &group)?;
        for _ in 0..20 {
            let mut batches = loader.epoch(0)?;
            batches.next().transpose()?;
            assert!(Arc::strong_count(&dataset) > 2, "the workers have it");
            drop(batches);
            assert_eq!(Arc::strong_count(&dataset), 2, "the loader's and this one");
        }
        assert!(loader.waited() > std::time::Duration::ZERO);
        Ok(())
    });
}

#[test]
fn program_can_match_on_what_is_wrong_with_its_input() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    std::fs::write(&file, "no tensors").unwrap();
    let spec: DatasetSpec = format!("safetensors:{}", file.display()).parse().unwrap();
    let tensor = |len: i64| Tensor::zeros([len, 1], (Kind::Float, Device::Cpu));
    for (error, expected) in [
        (DistributedSampler::new(10, 2, 5).err(), InputKind::Usage),
        (FileDataset::open(&spec, TargetKind::Values).err(), InputKind::Data),
        (TensorDataset::new(tensor(3), tensor(2)).err(), InputKind::Mismatch),
        (Autocast::new(Device::Cpu, Kind::Int).err(), InputKind::Unsupported),
    ] {
        let error = error.unwrap();
        assert!(matches!(error, Error::Input { kind, .. } if kind == expected), "{error:?}");
    }
}
