//! [`FileDataset`]: a data set in files of any supported format.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::array::Array;
use super::{DatasetSpec, TargetKind};
use crate::data::dataset::Samples;
use crate::data::{Dataset, Targets, TensorDataset};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;

/// The samples of a file, mapped into memory if the format allows it, and converted batch by batch.
///
/// A sample's inputs become one row of float32, whatever their shape. Unsigned bytes are pixels and are divided by
/// 255. Targets become rows of float32, or int64 classes.
///
/// A mapped file must not change. If it becomes shorter, the process prints a message and exits with code 1. A SIGBUS
/// handler, installed when the first file is mapped, does this.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use ddp_mp::{Dataset, DatasetSpec, FileDataset, TargetKind, Targets};
///
/// let digits = FileDataset::open(&DatasetSpec::DIGITS, TargetKind::Classes)?;
/// assert_eq!((digits.len(), digits.in_features()), (1797, 64));
/// assert_eq!(digits.targets(), Targets::Classes(10));
/// let (inputs, targets) = digits.batch(&[0, 1, 2])?;
/// assert_eq!((inputs.size(), targets.size()), (vec![3, 64], vec![3]));
/// # anyhow::Ok(())
/// ```
#[derive(Debug, Clone)]
pub struct FileDataset {
    name: String,
    /// The inputs in the file's dtype, and one row or one class per sample.
    samples: Samples,
    /// Whether the inputs are divided by 255.
    is_pixels: bool,
    predicts: Targets,
}

impl FileDataset {
    /// Opens the data set that `spec` names.
    ///
    /// # Errors
    /// [`Error::Input`] that names the file, the problem, and the remedy. Also for random data, which has no
    /// file.
    pub fn open(spec: &DatasetSpec, kind: TargetKind) -> Result<Self> {
        let (inputs, targets) = spec.read(kind)?;
        Self::new(spec.to_string(), inputs, targets, kind)
    }

    /// Opens the validation samples of `spec` in files of their own, such as MNIST's `t10k` files. `None` if there are
    /// none.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_validation(spec: &DatasetSpec, kind: TargetKind) -> Result<Option<Self>> {
        let Some((name, (inputs, targets))) = spec.read_validation()? else { return Ok(None) };
        Self::new(format!("{spec} ({name})"), inputs, targets, kind).map(Some)
    }

    fn new(name: String, inputs: Array, targets: Array, kind: TargetKind) -> Result<Self> {
        let wrong = |problem: String| Err(Error::data(format!("{name}: {problem}")));
        let Array { tensor: inputs, is_pixels } = inputs;
        let targets = targets.tensor;
        let count = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
        let (samples, labels) = (count(&inputs), count(&targets));
        if samples == 0 || samples != labels {
            return wrong(format!(
                "there are {samples} inputs and {labels} targets; the first dimension counts the samples, and each \
                 needs both"
            ));
        }
        if kind == TargetKind::Classes && targets.numel() != samples as usize {
            return wrong(format!(
                "targets of the shape {:?} are not one class for each of {samples} samples; use --loss mse for \
                 numbers",
                targets.size()
            ));
        }
        let doing = "reading a data file";
        let row = |tensor: Tensor| tensor.f_view([samples, -1]).doing(doing);
        let (inputs, mut targets) = (row(inputs)?, row(targets)?);
        let predicts = match kind {
            TargetKind::Values => Targets::Values(targets.size()[1]),
            TargetKind::Classes => {
                targets = targets.f_view(samples).doing(doing)?;
                Targets::Classes(count_classes(&name, &targets)?)
            }
        };
        Ok(Self { name, samples: Samples::new(inputs, targets), is_pixels, predicts })
    }

    /// Returns the name under which the data set was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the first `samples` samples.
    ///
    /// # Errors
    /// [`Error::Input`] for 0, and for more samples than there are.
    pub fn first(self, samples: usize) -> Result<Self> {
        Ok(Self { samples: self.samples.first(samples, &self.name, "samples")?, ..self })
    }

    /// Returns the number of inputs per sample.
    pub fn in_features(&self) -> i64 {
        let (inputs, _) = self.samples.handles();
        inputs.size()[1]
    }

    /// Returns the number of values per target, or the number of classes in the file (the highest class plus one).
    pub fn targets(&self) -> Targets {
        self.predicts
    }

    /// Checks that all classes are below `classes`.
    ///
    /// # Errors
    /// [`Error::Input`] that names the first sample with a higher class.
    pub fn check_classes(&self, classes: i64) -> Result<()> {
        let Some((sample, class)) = self.class_from(classes)? else { return Ok(()) };
        Err(Error::data(format!(
            "{}: sample {sample} has class {class}, and {classes} classes count from 0 to {}; use {} or more",
            self.name,
            classes - 1,
            class + 1.0
        )))
    }

    /// Returns the first sample whose class is `least` or more, with its class. `None` if there is none.
    fn class_from(&self, least: i64) -> Result<Option<(i64, f64)>> {
        let is_like = |class: &Tensor| class.f_ge(least);
        let (_, targets) = self.samples.handles();
        find(&targets, is_like).doing("looking at classes")
    }

    /// Checks that there are not more classes than samples. One wrong class number in the file can cause this.
    ///
    /// # Errors
    /// [`Error::Input`] that names the first sample with such a class.
    pub fn check_number_of_classes(&self) -> Result<()> {
        let samples = self.len() as i64;
        match self.predicts {
            Targets::Classes(classes) if classes > samples => {
                let (sample, class) = self.class_from(samples)?.unwrap_or_default();
                Err(Error::data(format!(
                    "{}: sample {sample} has class {class}, which makes {} classes, and there are {samples} samples; \
                     correct it, or give the number of classes with --out-features",
                    self.name,
                    class + 1.0
                )))
            }
            _ => Ok(()),
        }
    }

    /// Returns views of the whole file. `None` if samples must be converted.
    fn views(&self) -> Option<(Tensor, Tensor)> {
        let (inputs, targets) = self.samples.handles();
        let is_ready =
            !self.is_pixels && (inputs.kind(), targets.kind()) == (Kind::Float, self.target_kind());
        is_ready.then_some((inputs, targets))
    }

    fn target_kind(&self) -> Kind {
        match self.predicts {
            Targets::Values(_) => Kind::Float,
            Targets::Classes(_) => Kind::Int64,
        }
    }

    /// Converts this into the fastest form for loaders. A small data set (inputs of up to 1 GiB) that needs no
    /// conversion is copied to a GPU once, any other batch by batch.
    ///
    /// # Errors
    /// [`Error::Torch`] if there is no memory.
    pub fn into_dataset(self) -> Result<Arc<dyn Dataset>> {
        const MAX_CONVERTED_BYTES: usize = 1 << 30;
        match self.views() {
            Some((inputs, targets)) if inputs.numel() * 4 <= MAX_CONVERTED_BYTES => {
                Ok(Arc::new(TensorDataset::new(inputs, targets)?))
            }
            _ => Ok(Arc::new(self)),
        }
    }
}

impl Dataset for FileDataset {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let (inputs, targets) = self.batch(&[index])?;
        Ok((inputs.f_get(0)?, targets.f_get(0)?))
    }

    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        let (inputs, targets) = self.samples.gathered(indices)?;
        let mut inputs = inputs.f_to_kind(Kind::Float)?;
        if self.is_pixels {
            inputs = inputs.f_div_scalar_(255.0)?;
        }
        Ok((inputs, targets.f_to_kind(self.target_kind())?))
    }

    fn resident(&self, device: Device) -> Result<Option<(Tensor, Tensor)>> {
        Ok(self.views().filter(|_| device == Device::Cpu))
    }
}

/// Returns the number of classes. An error if a target is not a class number.
pub(super) fn count_classes(name: &str, targets: &Tensor) -> Result<i64> {
    let highest = f64::from(i32::MAX);
    // NaN differs from its floor, so this finds it as well.
    let is_invalid = |class: &Tensor| {
        let outside = class.f_lt(0.0)?.f_logical_or(&class.f_gt(highest)?)?;
        class.f_ne_tensor(&class.f_floor()?)?.f_logical_or(&outside)
    };
    let doing = "looking at classes";
    if let Some((sample, class)) = find(targets, is_invalid).doing(doing)? {
        return Err(Error::data(format!(
            "{name}: the target of sample {sample} is {class}, which is not a class: classes are whole numbers from \
             0; use --loss mse for other numbers"
        )));
    }
    let most = targets.f_max().and_then(|most| most.f_double_value(&[])).doing(doing)?;
    Ok(most as i64 + 1)
}

/// Returns the number and the value of the first target for which `is_like` is true. `None` if there is none.
pub(super) fn find(
    targets: &Tensor,
    is_like: impl Fn(&Tensor) -> Result<Tensor, tch::TchError>,
) -> Result<Option<(i64, f64)>, tch::TchError> {
    /// The number of targets checked at a time. All at once would take several times the memory.
    const PART: i64 = 1 << 20;
    let len = targets.size()[0];
    for start in (0..len).step_by(PART as usize) {
        let part = targets.f_narrow(0, start, PART.min(len - start))?.f_to_kind(Kind::Double)?;
        let found = is_like(&part)?.f_to_kind(Kind::Uint8)?;
        let first = found.f_argmax(0, false)?.f_int64_value(&[])?;
        if found.f_int64_value(&[first])? != 0 {
            return Ok(Some((start + first, part.f_double_value(&[first])?)));
        }
    }
    Ok(None)
}
