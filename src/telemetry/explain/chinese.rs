//! The explanation in Chinese.

use super::texts::{Catalog, Section};
use super::{RunInfo, Step};

pub(super) struct Chinese;

impl Catalog for Chinese {
    fn rendezvous(&self, run_info: &RunInfo) -> Section {
        let RunInfo { world_size: n, processes, backend, .. } = run_info;
        let text = match (*n, *processes, *backend) {
            (1, ..) => "只有一个 rank：没有谁需要会合，求平均也不会改变任何数。用 --nproc-per-node=2 可以看到两个。".into(),
            (_, 1, "nccl") => format!(
                "{n} 个 rank 是同一进程里的线程，各用一块 GPU。rank 0 让 NCCL 生成一个 unique id（128 字节），\
                 经通道（channel）发给其余 rank，谁都不必挑选端口。各 rank 凭这个 id 加入同一个通信器\
                 （communicator），此后 GPU 之间就通过它通信。"
            ),
            (_, 1, _) => format!(
                "{n} 个 rank 是同一进程里的线程。rank 0 建好进程组通信用的共享内存，把它的句柄经通道（channel）\
                 发给其余 rank：不需要 id、地址和端口。（GPU 所需的 NCCL unique id 也走这条路；\
                 PyTorch 的 rank 是进程，在 MASTER_PORT 会合。）"
            ),
            (_, p, "nccl") => format!(
                "{n} 个 rank 分布在 {p} 个进程里，各进程已在 TCPStore 会合。第一个进程让 NCCL 生成一个 unique id\
                 （128 字节）并写入 store，其余进程从那里读取{}。各 rank 凭这个 id 加入同一个通信器\
                 （communicator），此后 GPU 之间就通过它通信。",
                if *n > p { "，同一进程的 rank 之间经通道（channel）转交" } else { "" }
            ),
            (_, p, _) => format!(
                "{n} 个 rank 分布在 {p} 个进程里，各进程已在 TCPStore 会合。这里没有 id：每个进程把自己的 Gloo \
                 地址写入 store，再读出其他进程的地址，彼此建立连接。{}",
                if *n > p { "同一进程的 rank 共享内存。" } else { "" }
            ),
        };
        Section::new("rank 如何会合", text)
    }

    fn start(&self, run_info: &RunInfo, were_same: bool, resumed: Option<u64>) -> Section {
        let RunInfo { world_size: n, model, parameters, seed, .. } = run_info;
        let who = if *n > 1 { "每个 rank 各自" } else { "这个 rank " };
        let mut text = format!("{who}用种子 {seed} 构建模型（{model}，{parameters} 个参数）");
        match resumed {
            Some(step) => text += &format!("，rank 0 再换成检查点（已训练 {step} 步）的参数"),
            None if run_info.starts_from_file => {
                text += "，rank 0 再换成文件里的参数（--init-from）"
            }
            None => {}
        }
        if *n > 1 {
            text += "，然后 rank 0 把自己的参数广播给所有 rank：";
            text += if run_info.partitions_optimizer {
                "此后每个 rank 只更新其中一部分，其他 rank 再复制这一部分（--zero）。"
            } else {
                "此后 rank 之间只交换梯度，初始权重不同的 rank 永远无法与其他 rank 一致。"
            };
            if were_same {
                text += "（这里原本就相同，但 DDP 不依赖这一点。）";
            }
        } else {
            text += "。";
        }
        if run_info.shares_model {
            text += "同一进程里的 rank 都是线程，因此共用一份参数（--share-model）。";
        }
        text += "参数的 64 位哈希：";
        Section::new("相同的起点", text)
    }

    fn built_and_now(&self) -> [&'static str; 2] {
        ["构建后", "训练开始时"]
    }

    fn data(&self, run_info: &RunInfo, epoch: u64) -> Section {
        let RunInfo { world_size: n, samples, seed, .. } = run_info;
        let order = match run_info.shuffles {
            true => {
                format!("用同一个种子（{seed} + epoch {epoch}）打乱全部 {samples} 个样本的编号")
            }
            false => format!("按原有顺序排列全部 {samples} 个样本"),
        };
        if *n == 1 {
            return Section::new("样本", format!("采样器{order}，全部交给这个 rank。"));
        }
        let left = samples % n;
        let rest = match (left, run_info.drops_last) {
            (0, _) => String::new(),
            (left, true) => format!("舍去其中 {left} 个，这样大家一样多。"),
            (left, false) if run_info.exact_mean => {
                format!("不能平分，rank 0 到 rank {} 各多一个。", left - 1)
            }
            (left, false) => format!("其中 {} 个分到两次，这样大家一样多。", n - left),
        };
        let text = format!(
            "每个 rank 的采样器都{order}，rank r 取其中第 r、r + {n}、r + {}……个（从 0 数起）。\
             于是各 rank 训练各自的样本，不需要谁来分发。{rest}",
            2 * n
        );
        Section::new("不同的样本", text)
    }

    fn gradients(&self, run_info: &RunInfo, step: &Step, compressed: Option<&str>) -> Section {
        let RunInfo { world_size: n, parameters, accumulate, .. } = run_info;
        let Step { step: number, weight, buckets, .. } = step;
        let adds_up = match accumulate {
            1 => String::new(),
            k => format!("（先在本地累积 {k} 个 batch 并取平均：--grad-accum-steps）"),
        };
        let compressed = compressed.map_or(String::new(), |name| self.compressed(name));
        if *n == 1 {
            let text = format!(
                "前向和反向传播得到梯度{adds_up}。全部 {parameters} 个梯度放在 {buckets} 个梯度桶（bucket）里。\
                 只有一个 rank，all-reduce（全归约）的平均值就是它自己。{compressed}其中最大的是 {weight} 的梯度："
            );
            return Section::new(format!("第 {number} 步：梯度"), text);
        }
        let mean = match step.shares(run_info) {
            None => format!("平均值：各除以 {n}"),
            Some(shares) => format!(
                "全部样本上的平均值（--exact-mean）：各乘以该 rank 的样本所占的比例（{shares}）"
            ),
        };
        let text = format!(
            "每个 rank 用自己的样本做前向和反向传播，得到自己的梯度{adds_up}。全部 {parameters} 个梯度放在 \
             {buckets} 个梯度桶（bucket）里。all-reduce（全归约）把它们换成{mean}，再把所有 rank \
             的相加。{compressed}其中最大的是 {weight} 的梯度："
        );
        Section::new(format!("第 {number} 步：不同的梯度合而为一"), text)
    }

    fn compressed(&self, name: &str) -> String {
        format!("梯度以 {name} 的形式传输（--comm-hook），所以平均值并不精确。")
    }

    fn columns(&self, num_samples: Option<usize>) -> [String; 5] {
        let samples = num_samples.map_or("样本".into(), |count| format!("样本（共 {count} 个）"));
        [samples, "损失".into(), "本地梯度".into(), "全归约后".into(), "新权重".into()]
    }

    fn by_hand(&self) -> &'static str {
        "手算："
    }

    fn update(&self, run_info: &RunInfo, step: u64, lr: &str) -> Section {
        let RunInfo { optimizer, world_size, .. } = run_info;
        if *world_size == 1 {
            let text = format!("优化器是 {optimizer}，学习率 {lr}。");
            return Section::new(format!("第 {step} 步：更新"), text);
        }
        if run_info.shares_model {
            let text = format!(
                "同一进程里的 rank 共用一份模型，只需更新一次：每个 rank 的优化器（{optimizer}，学习率 {lr}）负责更新\
                 其中一部分参数，然后等其他 rank 更新完其余部分。"
            );
            return Section::new(format!("第 {step} 步：各 rank 共同完成一次更新"), text);
        }
        if run_info.partitions_optimizer {
            let text = format!(
                "各 rank 分担优化器（--zero）：每个 rank 的优化器（{optimizer}，学习率 {lr}）只保存一部分参数（它的\
                 分区）的状态，也只更新这一部分，然后从其他 rank 取得其余参数的新值。演示的这几步之后，每个 rank 收到的\
                 也只是自己分区的平均梯度，除非某个选项要用到全部平均梯度。"
            );
            return Section::new(format!("第 {step} 步：各 rank 分担同一次更新"), text);
        }
        let text = format!(
            "每个 rank 的优化器（{optimizer}，学习率 {lr}）用同样的数做同样的计算，所以各 rank 的模型保持一致，\
             不必再次发送。"
        );
        Section::new(format!("第 {step} 步：每个 rank 做同样的更新"), text)
    }

    fn rule(&self, is_plain: bool) -> &'static str {
        if is_plain { "权重 - 学习率 * 梯度 = 新权重" } else { "权重 -> 新权重" }
    }

    fn clipped(&self, max_norm: &str, from: &str, to: &str) -> String {
        format!(
            "更新前先把全部梯度的范数裁剪到 {max_norm}（--max-grad-norm），这个梯度由 {from} 变为 {to}。"
        )
    }

    fn next_step(&self, step: u64) -> Section {
        Section::new(format!("第 {step} 步：新的样本，新的梯度，同一个平均值，同样的更新"), "")
    }

    fn remaining_steps(&self, steps_per_epoch: u64) -> String {
        format!("之后每一步都是如此，每个 epoch 共 {steps_per_epoch} 步。")
    }

    fn end(&self, run_info: &RunInfo, steps: u64) -> Section {
        let unsent = if run_info.partitions_optimizer {
            ""
        } else {
            "（开头广播之后再没有发送过）"
        };
        let text = match run_info.world_size {
            1 => format!("{steps} 步之后，这个 rank 结束。参数的哈希："),
            _ => format!(
                "{steps} 步之后，所有 rank 在屏障（barrier）处等齐，退出进程组，然后结束；只有 rank 0 负责汇总和\
                 写文件。参数{unsent}的哈希："
            ),
        };
        Section::new("结束", text)
    }

    fn verdict(&self, run_info: &RunInfo, are_same: bool) -> String {
        match (run_info.world_size, are_same) {
            (1, _) => "它也在最后一行里。".into(),
            (n, true) => format!("每一位都相同：{n} 个 rank 训练出了同一个模型。"),
            (_, false) => "并不相同！要么各 rank 保留了自己的缓冲区（--no-broadcast-buffers），\
                           要么出了错（用 --check-replicas-every 查找）。"
                .into(),
        }
    }
}
