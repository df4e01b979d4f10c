//! The lessons in Chinese. The Chinese pages of the book show the tasks, too: `tests/lesson.rs` compares them.

use super::lessons::{Chapter, Lesson};
use super::texts::{Catalog, Texts, Words};

pub(super) struct Chinese;

impl Catalog for Chinese {
    fn chapter(&self, chapter: Chapter) -> &'static str {
        match chapter {
            Chapter::Demo => "示例",
            Chapter::Explain => "讲解",
            Chapter::Watch => "观察",
            Chapter::Break => "弄坏它",
            Chapter::ByHand => "亲手实现",
            Chapter::OwnModel => "自己的模型",
            Chapter::Gpt => "GPT",
            Chapter::SeveralMachines => "多台机器",
        }
    }

    fn heading(&self, id: &str, title: &str) -> String {
        if id.starts_with(|c: char| c.is_ascii_digit()) {
            format!("第 {id} 课：{title}")
        } else {
            format!("{id} 课：{title}")
        }
    }

    fn words(&self) -> Words {
        Words {
            program: "程序：",
            run: "运行：",
            check: "检查答案：",
            give_up: "看答案：",
            right: "正确：",
            wrong: "不对：",
            hint: "提示：",
            answer: "答案：",
            measured: "实测：",
            why: "原因：",
            yes: "是",
            no: "否",
            unchecked: "（无法检查）",
            how: "ddp-mp lesson LESSON 显示一道练习；加上 --answer=ANSWER，程序会实际运行一次来检查答案。",
        }
    }

    fn texts(&self, lesson: Lesson) -> Texts {
        match lesson {
            Lesson::Demo => Texts {
                title: "运行示例",
                learn: "每个 rank 走几步",
                task: "在 `ddp-mp --max-epochs=2 --batch-size=32 --nproc-per-node=4` 里，把 `--nproc-per-node=4` 改成 \
                       `--nproc-per-node=3`。每个 rank 在一个 epoch 里走几步？",
                hint: "每个 rank 分到 4096 个样本的三分之一，向上取整。最后一个 batch 可能不足 32 个，但仍然要走一步。",
                measured: "每个 rank 分到 {0} 个样本，走了 {1} 步。",
                why: "4096 / 3 向上取整是 {0}，{0} / 32 向上取整是 {1}；最后一个 batch 有 {2} 个样本。",
            },
            Lesson::Shards => Texts {
                title: "分片",
                learn: "每个 rank 分到哪些样本，什么是填充",
                task: "在 `ddp-mp sampler --len=6 --world-size=2` 里，把 `--world-size=2` 改成 `--world-size=4`。有几\
                       行以 `(padding)` 结尾？",
                hint: "所有 rank 分到的样本数必须相同，走的步数才会相同；而 6 个样本不能被 4 整除。",
                measured: "所有 rank 一共分到 {0} 个样本，每个 {2} 个，其中 {1} 个是重复的。",
                why: "6 / 4 向上取整是 {2}，所以一共需要 {0} 个样本。采样器和 PyTorch 一样，把顺序中最前面的 {1} \
                      个再分一次。样本较少的 rank 会少走一步，其他 rank 就会在 all-reduce 里一直等它。",
            },
            Lesson::Update => Texts {
                title: "一次更新",
                learn: "优化器拿平均梯度做什么",
                task: "在 `ddp-mp --nproc-per-node=2 --explain --lr=0.001` 里，把 `--lr=0.001` 改成 `--lr=0.01`。第 0 \
                       步之后，新的 `weight[0][18]` 是多少？写六位小数。",
                hint: "变的只有学习率。从学习率为 0.001 时 `--explain` 的输出里取出旧权重和平均梯度，计算：权重 - 学\
                       习率 * 梯度。",
                measured: "旧权重是 {0}，平均梯度是 {1}，新权重是 {2}。",
                why: "{0} - 0.01 * ({1}) = {2}。第一步的梯度与学习率无关。",
            },
            Lesson::Batch => Texts {
                title: "一个 rank 用整个 batch",
                learn: "N 个 rank 与一个 rank 为什么结果一致，却不逐位相同",
                task: "把 `ddp-mp --nproc-per-node=2 --batch-size=32` 的选项改成 `--nproc-per-node=1 \
                       --batch-size=64`，每一步用的仍是同样的 64 个样本。参数的哈希也相同吗？",
                hint: "舍入之后，和与相加的顺序有关。一个 rank 把 64 个样本一次加完；两个 rank 各加 32 个，再把两个和\
                       相加。",
                measured: "两个 rank：损失 {0}，参数 {2}；一个 rank：损失 {1}，参数 {3}。",
                why: "损失一致，但参数的最后几位不同：(a + b) + (c + d) 与 ((a + b) + c) + d 的舍入发生在不同的地方。",
            },
            Lesson::Straggler => Texts {
                title: "一个慢的 rank",
                learn: "掉队者在时间线上怎样显现",
                task: "在 `ddp-mp --max-epochs=1 --batch-size=32 --nproc-per-node=2 --report=ranks.html` 后面加上 \
                       `--inject-fault=slow=20ms:rank=1,at=step`，让 rank 1 在每一步开始时休眠一会儿。哪个 rank 的 \
                       all-reduce 变长，0 还是 1？",
                hint: "最后一个 rank 到达时，all-reduce 才结束。最后到的那个 rank 并不在里面等待。",
                measured: "rank 0 在 all-reduce 里用了 {0} 秒，rank 1 用了 {1} 秒。",
                why: "在 all-reduce 里等待的是不慢的 rank。所以 all-reduce 变长，说明慢的是别的 rank；报告会指出它就是\
                      掉队者（straggler）。",
            },
            Lesson::Desync => Texts {
                title: "参数不同的 rank",
                learn: "rank 之间的差异何时被发现",
                task: "在 `ddp-mp --nproc-per-node=3 --inject-fault=desync:rank=1,at=step,step=5 \
                       --check-replicas-every=1` 里，把 `--check-replicas-every=1` 改成 `--check-replicas-every=4`。\
                       程序在第几步之后发现差异？步数从 0 开始数。",
                hint: "每走完 4 步、8 步……比较一次；rank 1 在第 5 步之后改动自己的参数。",
                measured: "第 {0} 步之后的比较发现了 rank {1}。",
                why: "第 0 步到第 {0} 步一共是 {2} 步。比较之前各 rank 照常训练，第 5 步以来的计算全都作废。与大模型的\
                      一步相比，比较一次的代价很小。",
            },
            Lesson::OneRank => Texts {
                title: "一个 rank",
                learn: "一个 batch 为什么可以分给几个 rank",
                task: "把 `FIRST: i64 = 32` 改成 `FIRST: i64 = 48`。两个梯度于是分别来自 48 个和 16 个样本，它们的平\
                       均不再是全部 64 个样本的梯度。第一个梯度要乘上多大的权重，加权和才重新正确？第二个的权重是 1 \
                       减去它。",
                hint: "每个样本的分量必须相同。",
                measured: "权重 {0} 和 {1} 给出全部 64 个样本的梯度；两个权重相等时相差 {2}。",
                why: "48 / 64 = 0.75：梯度是它那些样本上的平均，所以它的权重就是样本所占的比例。各 rank 的 batch \
                      大小不同时，`--exact-mean` 就是这样做的。",
            },
            Lesson::ThreadsThatMeet => Texts {
                title: "线程会合",
                learn: "rank 怎样会合，一个失败时会怎样",
                task: "删掉 `shared.barrier.wait();` 这一行，把程序运行二十次。rank 0 最常得到的和是多少？为什么不总\
                       是这个数？",
                hint: "rank 0 分配好各个位置和屏障，就立刻往下走；其他 rank 还得先收到指向它们的指针。",
                measured: "竞态每次的结果都不同，所以没有哪次运行能检查答案。",
                why: "rank 0 最常得到 0：它相加的时候，别的 rank 都还没有写入。偶尔有别的 rank 足够快，rank 0 就得到 \
                      20，甚至 60。竞态也会碰巧正确，所以测试可能通过。库里的集合通信自带屏障。",
            },
            Lesson::AllReduceByHand => Texts {
                title: "亲手写 all-reduce",
                learn: "环形和集中到一个 rank 各要多少代价",
                task: "把 `RANKS: usize = 4` 改成 `RANKS: usize = 8`。全部经过 rank 0 时，rank 0 发送多少 KiB？环形时又\
                       是多少？",
                hint: "张量有 256 KiB。全部经过 rank 0 时，它要发给其他每个 rank 一份；环形时每个 rank 发送 2 (N - 1) \
                       块，每块是张量的 N 分之一。",
                measured: "全部经过 rank 0 时，它发送 {0} KiB，其他 rank 各 {2} KiB；环形时每个 rank 发送 {1} KiB。",
                why: "全部经过 rank 0 时，字节数随 rank 数增长：7 * 256。环形时始终不到张量的两倍：14 块，每块 32。",
            },
            Lesson::NaiveDdp => Texts {
                title: "朴素的 DDP",
                learn: "让训练循环变成数据并行的两个调用",
                task: "删掉 `group.broadcast(parameter, 0)?;` 这一行，让每个 rank 从自己的参数出发。训练之后，四个副\
                       本相同吗？",
                hint: "每一步里，所有 rank 减去同一个平均梯度。两个 rank 之间的差会因此怎样变化？",
                measured: "训练之后有 {0} 个不同的哈希；平均损失从 {1} 降到 {2}。",
                why: "所有 rank 减去的数相同，所以它们之间的差始终是开始时的样子。损失照样下降：没有另一次运行可以对\
                      照，就什么也看不出来。正因如此，库才要广播参数，也能比较副本。",
            },
            Lesson::Buckets => Texts {
                title: "梯度桶",
                learn: "梯度为什么要一起传",
                task: "把 `PARAMETERS_PER_BUCKET: usize = 20` 改成 `PARAMETERS_PER_BUCKET: usize = 6`。一步里有几次 \
                       all-reduce？",
                hint: "一共有 20 个权重和 20 个偏置；最后一个桶可以小一些。",
                measured: "{1} 个参数用了 {0} 次 all-reduce；一个 rank 发送了 {2} 字节。",
                why: "20 个权重和 20 个偏置一共是 40 个参数，40 / 6 向上取整是 {0}。字节数与桶无关，变的只是 \
                      all-reduce 的次数。",
            },
            Lesson::Overlap => Texts {
                title: "重叠",
                learn: "反向传播进行中，桶何时可以发出",
                task: "把 `bucket_cap_mb = 1.0` 改成 `bucket_cap_mb = 3.0`。一共有几个桶？第一个桶发出时，有几个梯度\
                       已经就绪？",
                hint: "第一个桶有自己的容量，1 MiB（`DdpOptions` 的 `first_bucket_mb`），好让它早些发出。哪个梯度使桶\
                       达到容量，桶就到它为止。",
                measured: "一共 {0} 个桶，各桶发出时已就绪的梯度数依次是 {2}。",
                why: "一层比 1 MiB 略大。第一个桶装一层，也就是 {1} 个梯度；下一个桶要三层才达到 3 MiB；剩下两层。桶\
                      越大，all-reduce 的次数越少，但能与反向传播重叠的通信也越少。",
            },
            Lesson::YourOwnModel => Texts {
                title: "自己的模型",
                learn: "训练程序的样子，以及采样器",
                task: "把 `(rank.world_size(), rank.rank())` 改成 `(1, 0)`，就像程序里没有 `DistributedSampler` \
                       一样。这时两个 rank 在一个 epoch 里一共数到多少个点？",
                hint: "每个 rank 都当作只有自己一个。一共有 2000 个点。",
                measured: "两个 rank 一共数到 {0} 个点；各用自己的采样器时是 {1} 个。",
                why: "每个 rank 都在全部的点上训练。不会有任何报错，损失也很正常，只是一个 epoch 要花两倍的时间，第二\
                      个 rank 没有帮上忙。",
            },
            Lesson::TheEngine => Texts {
                title: "DDP 的其他功能",
                learn: "累积、混合精度、裁剪、钩子、dropout",
                task: "把 `is_last = number + 1 == step_batches.len()` 改成 `is_last = true`，这样就从不使用 \
                       `no_sync`。在由两个 batch 组成的一步里，通信钩子被调用几次？",
                hint: "模型只有一个桶。每次求平均的反向传播里，每个桶调用一次钩子。",
                measured: "{0} 次；用 `no_sync` 时是 {1} 次。",
                why: "现在每次反向传播都求平均。和的平均等于平均的和，所以结果几乎不变，但通信量翻了一倍。",
            },
            Lesson::DataAndValidation => Texts {
                title: "数据与验证",
                learn: "由 worker 加载数据，验证时每个样本只算一次",
                task: "删掉 `.uneven()`。程序的检查会失败：留出的样本是 601 个。验证时实际数到多少个？",
                hint: "两个 rank 分到的样本数必须相同，而 601 是奇数。",
                measured: "样本有 {1} 个，各 rank 一共数到 {0} 个。",
                why: "采样器重复了一个样本作为填充。训练时这没有多大害处；验证时，这个样本就算了两次。",
            },
            Lesson::Checkpoints => Texts {
                title: "检查点",
                learn: "中途停下的运行，最后逐位相同",
                task: "把 `steps: Some(10)` 改成 `steps: Some(7)`。第一次运行仍在第 45 步之后停下。第二次运行从第几步\
                       继续？",
                hint: "答案不是 7 的倍数。这次运行是按要求停下的，并没有被杀死。",
                measured: "最新的检查点是 {1}，所以从第 {0} 步继续。",
                why: "运行结束之前总会保存，按要求停下时也一样。只有被杀死时才轮到 7 的倍数：那样最后一个是 42，会丢\
                      掉三步。",
            },
            Lesson::Gpt => Texts {
                title: "一个 GPT",
                learn: "模型怎样学会生成文本，它的样本是什么",
                task: "把 `BLOCK_SIZE: usize = 32` 改成 `BLOCK_SIZE: usize = 64`。在一步里，两个 rank 一共要求模型做\
                       多少次预测？",
                hint: "一步里，两个 rank 各有 16 个上下文；对上下文里的每个字节，模型都要预测它后面的那个字节。",
                measured: "{1} 个上下文里有 {0} 次预测；未经训练的模型每个字节需要 {2} 位。",
                why: "2 个 rank * 16 个上下文 * 64 个字节。样本数不变，但每个样本的目标多了一倍。未经训练的模型认为 \
                      256 种字节的可能性差不多，所以需要 8 位。",
            },
            Lesson::WhatGrows => Texts {
                title: "什么随模型增长",
                learn: "通信量与内存，以及各自的对策",
                task: "把 `RANKS: usize = 4` 改成 `RANKS: usize = 8`。`replicas` 各行里的 KiB 变成原来的多少倍？写两\
                       位小数。",
                hint: "和第 3 课的环形一样，一个 rank 发送的字节数是梯度的 2 (N - 1) / N 倍。",
                measured: "4 个 rank 时，每个 rank 发送 {0} KiB；8 个 rank 时发送 {1} KiB，是原来的 {2} 倍。",
                why: "(2 * 7 / 8) / (2 * 3 / 4) = 1.17。不论有多少个 rank，一个 rank 发送的都不到梯度的两倍；增长的是\
                      互相等待的 rank 数。",
            },
            Lesson::SeveralMachines => Texts {
                title: "多台机器",
                learn: "同样的 rank，分在几个进程里",
                task: "四个 rank 在一个进程里训练示例：`ddp-mp --nproc-per-node=4`。再用两台机器训练，每台两个 rank：\
                       第一台用 `ddp-mp --nnodes=2 --node-rank=0 --master-addr=node0 --nproc-per-node=2`，第二台把它\
                       改成 `--node-rank=1`。参数逐位相同吗？",
                hint: "四个 rank 的样本都和原来一样。它们的四个梯度按什么顺序相加？",
                measured: "一个进程时参数是 {0}，两台机器时是 {1}。",
                why: "一个进程按 rank 的顺序相加：((a + b) + c) + d。两个进程先在各自内部相加：(a + b) + (c + d)。舍\
                      入不同，和 `batch` 那一课一样。四个进程各一个 rank 时，顺序与一个进程相同，每一位也就相同。",
            },
        }
    }
}
