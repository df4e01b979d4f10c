//! The trainer of a built-in model, compiled with this crate.
//!
//! rustc compiles a generic function in the crate that calls it. The crate of ddp-mp's command line is not optimized, so
//! that the first build is short, and a step of one layer would take 7 % longer. So this crate compiles the functions that
//! lead to what a step runs. They are `#[inline(never)]`: rustc lets other crates call such functions where they are compiled.

use super::{Criterion, FingerprintOptions, Summary, Trainer, TrainerOptions};
use crate::data::DataLoader;
use crate::ddp::DistributedDataParallel;
use crate::error::Result;
use crate::events::Observers;
use crate::models::Model;
use crate::optim::{Optimizer, Schedule};

type BuiltIn = Trainer<Model>;
type Ddp = DistributedDataParallel<Model>;

type New = fn(Ddp, Box<dyn Optimizer>, Schedule, DataLoader, Criterion) -> Result<BuiltIn>;

#[used]
static NEW: New = BuiltIn::new;
#[used]
static OPTIONS: fn(BuiltIn, TrainerOptions) -> Result<BuiltIn> = BuiltIn::options;
#[used]
static VALIDATION: fn(BuiltIn, DataLoader, u64) -> BuiltIn = BuiltIn::validation;
#[used]
static OBSERVE: fn(BuiltIn, Observers, u64) -> BuiltIn = BuiltIn::observe;
#[used]
static FINGERPRINT: fn(BuiltIn, FingerprintOptions) -> BuiltIn = BuiltIn::fingerprint;
#[used]
static TRAIN: fn(&mut BuiltIn, u64) -> anyhow::Result<Summary> = BuiltIn::train;
