//! The lessons in English. The book shows the tasks, too: `tests/lesson.rs` compares them.

use super::lessons::{Chapter, Lesson};
use super::texts::{Catalog, Texts, Words};

pub(super) struct English;

impl Catalog for English {
    fn chapter(&self, chapter: Chapter) -> &'static str {
        match chapter {
            Chapter::Demo => "The demo",
            Chapter::Explain => "Explain it",
            Chapter::Watch => "Watch it",
            Chapter::Break => "Break it",
            Chapter::ByHand => "Build it by hand",
            Chapter::OwnModel => "Your own model",
            Chapter::Gpt => "A GPT",
            Chapter::SeveralMachines => "Several machines",
        }
    }

    fn heading(&self, id: &str, title: &str) -> String {
        format!("Lesson {id}: {title}")
    }

    fn words(&self) -> Words {
        Words {
            program: "Program: ",
            run: "Run: ",
            check: "Check: ",
            give_up: "Solution: ",
            right: "Right: ",
            wrong: "Not right: ",
            hint: "Hint: ",
            answer: "Answer: ",
            measured: "Measured: ",
            why: "Why: ",
            yes: "yes",
            no: "no",
            unchecked: " (no check)",
            how: "ddp-mp lesson LESSON shows an exercise, and --answer=ANSWER checks an answer by a run.",
        }
    }

    fn texts(&self, lesson: Lesson) -> Texts {
        match lesson {
            Lesson::Demo => Texts {
                title: "Start it",
                learn: "how many steps each rank makes",
                task: "In `ddp-mp --max-epochs=2 --batch-size=32 --nproc-per-node=4`, change `--nproc-per-node=4` to \
                       `--nproc-per-node=3`. How many steps does each rank make in an epoch?",
                hint: "Each rank gets a third of the 4096 samples, rounded up. The last batch may be smaller than 32, \
                       and still needs a step.",
                measured: "each rank got {0} samples and made {1} steps.",
                why: "4096 / 3 rounded up is {0}, and {0} / 32 rounded up is {1}. The last batch has {2} samples.",
            },
            Lesson::Shards => Texts {
                title: "Shards",
                learn: "which samples each rank gets, and what padding is",
                task: "In `ddp-mp sampler --len=6 --world-size=2`, change `--world-size=2` to `--world-size=4`. How \
                       many lines end with `(padding)`?",
                hint: "All ranks must get the same number of samples, so that all make the same number of steps. 6 \
                       samples cannot be divided by 4.",
                measured: "the ranks got {0} samples together, {2} each; {1} of them are there twice.",
                why: "6 / 4 rounded up is {2}, so the ranks need {0} samples. As PyTorch does, the sampler repeats the \
                      first {1} of the order. A rank with fewer samples would make fewer steps, and the others would \
                      wait for it in an all-reduce.",
            },
            Lesson::Update => Texts {
                title: "One update",
                learn: "what the optimizer does with the mean of the gradients",
                task: "In `ddp-mp --nproc-per-node=2 --explain --lr=0.001`, change `--lr=0.001` to `--lr=0.01`. What \
                       is the new `weight[0][18]` after step 0, with six decimals?",
                hint: "Only the learning rate changes. Take the old weight and the mean of the gradients from what \
                       `--explain` prints with lr 0.001, and compute weight - lr * gradient.",
                measured: "the weight was {0}, the mean of the gradients {1}, and the new weight is {2}.",
                why: "{0} - 0.01 * ({1}) = {2}. The gradient of the first step does not depend on the learning rate.",
            },
            Lesson::Batch => Texts {
                title: "One rank with the whole batch",
                learn: "why N ranks equal one rank, but not to the bit",
                task: "In `ddp-mp --nproc-per-node=2 --batch-size=32`, change the flags to `--nproc-per-node=1 \
                       --batch-size=64`. Each step then has the same 64 samples. Is the hash of the parameters the \
                       same, too?",
                hint: "A sum of rounded numbers depends on its order. One rank adds up 64 samples; two ranks add up 32 \
                       each, and then two sums.",
                measured: "two ranks: loss {0}, parameters {2}; one rank: loss {1}, parameters {3}.",
                why: "The losses agree. The last bits of the parameters do not, because (a + b) + (c + d) is rounded \
                      differently from ((a + b) + c) + d.",
            },
            Lesson::Straggler => Texts {
                title: "A slow rank",
                learn: "where a straggler shows in the timeline",
                task: "To `ddp-mp --max-epochs=1 --batch-size=32 --nproc-per-node=2 --report=ranks.html`, add \
                       `--inject-fault=slow=20ms:rank=1,at=step`. Rank 1 then sleeps at the start of each step. Which \
                       rank has the long all-reduces, 0 or 1?",
                hint: "An all-reduce ends when the last rank has arrived. The rank that arrives last does not wait in \
                       it.",
                measured: "in all-reduces rank 0 spent {0} s, and rank 1 {1} s.",
                why: "The rank that is not slow waits in the all-reduce. A long all-reduce therefore means that \
                      another rank is slow, and the report names that one as the straggler.",
            },
            Lesson::Desync => Texts {
                title: "Replicas that differ",
                learn: "when a difference between the ranks is found",
                task: "In `ddp-mp --nproc-per-node=3 --inject-fault=desync:rank=1,at=step,step=5 \
                       --check-replicas-every=1`, change `--check-replicas-every=1` to `--check-replicas-every=4`. \
                       After which step does the program find the difference? Steps count from 0.",
                hint: "The ranks compare after 4 steps, after 8, and so on. Rank 1 changes its parameter after step 5.",
                measured: "after step {0} the comparison found rank {1}.",
                why: "Steps 0 to {0} are {2} steps. Until the comparison the ranks continued to train, and all steps \
                      since step 5 are lost. A comparison costs little beside a step of a large model.",
            },
            Lesson::OneRank => Texts {
                title: "One rank",
                learn: "why ranks can share a batch",
                task: "Change `FIRST: i64 = 32` to `FIRST: i64 = 48`. The gradients are then those of 48 and of 16 \
                       samples, and their mean is not the gradient of all 64. By which weight must the first one be \
                       multiplied, so that the sum is right again? The weight of the second one is 1 minus that of \
                       the first.",
                hint: "Each sample must count equally.",
                measured: "the weights {0} and {1} give the gradient of all 64; with equal weights the difference is \
                           {2}.",
                why: "48 / 64 = 0.75: a gradient is a mean over its samples, so its weight is its share of the \
                      samples. `--exact-mean` does this where the ranks have batches of different size.",
            },
            Lesson::ThreadsThatMeet => Texts {
                title: "Threads that meet",
                learn: "how ranks meet, and how they fail",
                task: "Delete the line `shared.barrier.wait();`, and run the program twenty times. Which sum does rank \
                       0 get most often, and why is it not always the same?",
                hint: "Rank 0 allocates the slots and the barrier, and goes on at once. The other ranks must first \
                       receive a pointer to them.",
                measured: "A race gives a different result each time, so no run can check an answer.",
                why: "Most often rank 0 gets 0: it adds up before any other rank has written its slot. Now and then \
                      another rank is fast enough, and rank 0 gets 20 or even 60. A race can be right by chance, so \
                      tests may pass. The collectives of the library have the barrier inside.",
            },
            Lesson::AllReduceByHand => Texts {
                title: "All-reduce by hand",
                learn: "what a ring costs, and what one central rank costs",
                task: "Change `RANKS: usize = 4` to `RANKS: usize = 8`. How many KiB does rank 0 send through rank 0, \
                       and how many in the ring?",
                hint: "The tensor has 256 KiB. Through rank 0, that rank sends it to every other one. In the ring each \
                       rank sends 2 (N - 1) chunks, and a chunk is the N-th part.",
                measured: "through rank 0 it sent {0} KiB, any other rank {2}; in the ring each rank sent {1} KiB.",
                why: "Through rank 0 the bytes grow with the number of ranks: 7 * 256. In the ring they stay below \
                      twice the tensor: 14 chunks of 32.",
            },
            Lesson::NaiveDdp => Texts {
                title: "Naive DDP",
                learn: "the two calls that make a loop data parallel",
                task: "Delete the line `group.broadcast(parameter, 0)?;`, so that each rank starts from parameters of \
                       its own. Are the four replicas equal after the training?",
                hint: "In each step all ranks subtract the same mean gradient. What does that do to a difference \
                       between two ranks?",
                measured: "there are {0} different hashes after training; the mean loss went from {1} to {2}.",
                why: "All ranks subtract the same numbers, so their differences stay as they were at the start. The \
                      loss still falls: without a run to compare with, nothing shows the mistake. That is why the \
                      library broadcasts the parameters, and can compare replicas.",
            },
            Lesson::Buckets => Texts {
                title: "Buckets",
                learn: "why gradients travel together",
                task: "Change `PARAMETERS_PER_BUCKET: usize = 20` to `PARAMETERS_PER_BUCKET: usize = 6`. How many \
                       all-reduces does a step make?",
                hint: "There are 20 weights and 20 biases. The last bucket may be smaller.",
                measured: "{0} all-reduces for {1} parameters; a rank sent {2} bytes.",
                why: "20 weights and 20 biases are 40 parameters, and 40 / 6 rounded up is {0}. The bytes do not \
                      depend on the buckets; only the number of all-reduces does.",
            },
            Lesson::Overlap => Texts {
                title: "Overlap",
                learn: "when a bucket can go out during backward",
                task: "Change `bucket_cap_mb = 1.0` to `bucket_cap_mb = 3.0`. How many buckets are there, and how \
                       many gradients are ready when the first one goes out?",
                hint: "The first bucket has a capacity of its own, 1 MiB (`first_bucket_mb` in `DdpOptions`), so that \
                       it goes out early. A bucket is closed by the gradient that reaches its capacity.",
                measured: "{0} buckets; when they went out, {2} gradients were ready.",
                why: "A layer has slightly more than 1 MiB. The first bucket has one layer, that is {1} gradients. The \
                      next one takes three layers to reach 3 MiB, and two are left. With larger buckets there are \
                      fewer all-reduces, but less of their time overlaps with backward.",
            },
            Lesson::YourOwnModel => Texts {
                title: "Your own model",
                learn: "the shape of a training program, and its sampler",
                task: "Change `(rank.world_size(), rank.rank())` to `(1, 0)`, as in a program without \
                       `DistributedSampler`. How many points does an epoch now count on both ranks together?",
                hint: "Each rank now behaves as if it were the only one. There are 2000 points.",
                measured: "the ranks counted {0} points; with the sampler of each rank they count {1}.",
                why: "Every rank trains on all points. Nothing fails, and the loss looks good. But the epoch takes \
                      twice as long, and the second rank does not help.",
            },
            Lesson::TheEngine => Texts {
                title: "More of DDP",
                learn: "accumulation, mixed precision, clipping, hooks, dropout",
                task: "Change `is_last = number + 1 == step_batches.len()` to `is_last = true`, so that `no_sync` is \
                       never used. How often is the communication hook called in a step of two batches?",
                hint: "The model has one bucket. The hook is called for each bucket of a backward pass that averages.",
                measured: "{0} calls, and {1} with `no_sync`.",
                why: "Every backward pass averages now. The result is nearly the same, because a mean of sums is the \
                      sum of means, but the ranks communicate twice as much.",
            },
            Lesson::DataAndValidation => Texts {
                title: "Data and validation",
                learn: "workers that load, and samples that count once",
                task: "Delete `.uneven()`. The check of the program fails: 601 samples were held back. How many does \
                       the validation count instead?",
                hint: "Both ranks must get the same number of samples. 601 is odd.",
                measured: "the ranks counted {0} samples of {1}.",
                why: "The sampler repeats a sample as padding. In training that does little harm; in validation it \
                      counts one sample twice.",
            },
            Lesson::Checkpoints => Texts {
                title: "Checkpoints",
                learn: "a run that is stopped and ends with the same bits",
                task: "Change `steps: Some(10)` to `steps: Some(7)`. The first run still stops after step 45. From \
                       which step does the second run continue?",
                hint: "It is not a multiple of 7. The run was asked to stop; it was not killed.",
                measured: "the newest checkpoint was {1}, so the run continues from step {0}.",
                why: "A run saves before it ends, also when it is asked to stop. The multiples of 7 matter only if it \
                      is killed: then 42 would be the last, and three steps would be lost.",
            },
            Lesson::Gpt => Texts {
                title: "A GPT",
                learn: "how a model learns to write, and what its samples are",
                task: "Change `BLOCK_SIZE: usize = 32` to `BLOCK_SIZE: usize = 64`. How many predictions does a step \
                       ask of the model, on both ranks together?",
                hint: "A step has 16 contexts on each of two ranks. The model predicts the byte after each byte of a \
                       context.",
                measured: "{0} predictions from {1} contexts; the untrained model needs {2} bits for each byte.",
                why: "2 ranks * 16 contexts * 64 bytes. The number of samples does not change, but each has twice as \
                      many targets. An untrained model finds all 256 bytes about equally likely, which takes 8 bits.",
            },
            Lesson::WhatGrows => Texts {
                title: "What grows with a model",
                learn: "traffic and memory, and what one can do about each",
                task: "Change `RANKS: usize = 4` to `RANKS: usize = 8`. By which factor do the KiB in the `replicas` \
                       rows grow, with two decimals?",
                hint: "A rank sends 2 (N - 1) / N times the bytes of the gradients, as in the ring of lesson 3.",
                measured: "a rank sent {0} KiB with 4 ranks and {1} KiB with 8, which is {2} times as much.",
                why: "(2 * 7 / 8) / (2 * 3 / 4) = 1.17. However many ranks there are, a rank never sends twice its \
                      gradients. What grows is the number of ranks that wait for each other.",
            },
            Lesson::SeveralMachines => Texts {
                title: "Several machines",
                learn: "the same ranks in several processes",
                task: "Four ranks train the demo in one process: `ddp-mp --nproc-per-node=4`. Two machines train it \
                       with two ranks each: `ddp-mp --nnodes=2 --node-rank=0 --master-addr=node0 --nproc-per-node=2` \
                       on the first, and the same with `--node-rank=1` on the second. Are the parameters the same to \
                       the bit?",
                hint: "All four ranks have the same samples as before. In which order are their four gradients added?",
                measured: "parameters {0} in one process, and {1} on two machines.",
                why: "One process adds in the order of the ranks, ((a + b) + c) + d. Two processes first add within \
                      each: (a + b) + (c + d). The rounding differs, as in the lesson `batch`. With one rank in each \
                      of four processes the order, and the bits, are those of one process.",
            },
        }
    }
}
