//! Collectives that gradients flow through.

use ddp_mp::process_group::functional;
use ddp_mp::{ReduceOp, ffi};
use tch::{Kind, Tensor};

use super::{Surface, numbers, reduced};

pub(super) fn functional_all_reduce(it: &Surface) {
    let mine = it.mine(3, Kind::Float).set_requires_grad(true);
    let sum = functional::all_reduce(&mine, &it.group).unwrap();
    let expected = reduced(ReduceOp::Sum, &it.of_all(3));
    it.is(&sum.detach(), &expected);
    // Each rank's loss is sum^2, and each depends on `mine` with the gradient 2 * sum.
    ffi::backward(&sum.square().sum(Kind::Float)).unwrap();
    let factor = 2.0 * it.size() as f64;
    it.is(&mine.grad(), &expected.iter().map(|sum| factor * sum).collect::<Vec<_>>());
}

// The other collectives that gradients flow through. Rank `r` multiplies its result number `j` with `weights(r, j)`, and its
// loss is the sum of that; so these are the gradients of the results, and each operation is linear.

const LEN: usize = 3;

fn weights(rank: usize, result: usize) -> Vec<f64> {
    numbers(rank + 3, LEN).iter().map(|it| it + 10.0 * result as f64).collect()
}

/// The sum of lists, element by element.
fn sum(lists: impl Iterator<Item = Vec<f64>>) -> Vec<f64> {
    reduced(ReduceOp::Sum, &lists.collect::<Vec<_>>())
}

impl Surface {
    fn trained(&self, len: usize) -> Tensor {
        self.mine(len, Kind::Float).set_requires_grad(true)
    }

    /// A list with a tensor for each rank, of one tensor that is trained: number `i` is `numbers(me) + i`.
    fn trained_list(&self) -> (Tensor, Vec<Tensor>) {
        let rows: Vec<f64> = (0..self.size()).flat_map(|index| row(self.me(), index)).collect();
        let whole = self.tensor(&rows, Kind::Float).set_requires_grad(true);
        let list = whole.split(LEN as i64, 0);
        (whole, list)
    }

    /// Goes backward from this rank's loss, and compares the gradient of `mine` with its definition.
    #[track_caller]
    fn goes_back(&self, results: &[Tensor], mine: &Tensor, expected: &[f64]) {
        let parts = results.iter().enumerate();
        let parts = parts.map(|(index, it)| {
            (it * self.tensor(&weights(self.me(), index), Kind::Float)).sum(Kind::Float)
        });
        ffi::backward(&parts.sum::<Tensor>()).unwrap();
        self.is(&mine.grad(), expected);
    }

    fn everyone(&self) -> std::ops::Range<usize> {
        0..self.size()
    }
}

fn row(rank: usize, index: usize) -> Vec<f64> {
    numbers(rank, LEN).iter().map(|it| it + index as f64).collect()
}

pub(super) fn functional_broadcast(it: &Surface) {
    for root in it.everyone() {
        let mine = it.trained(LEN);
        let result = functional::broadcast(&mine, root, &it.group).unwrap();
        it.is(&result.detach(), &numbers(root, LEN));
        let all = sum(it.everyone().map(|rank| weights(rank, 0)));
        it.goes_back(&[result], &mine, if it.me() == root { &all } else { &[0.0; LEN] });
    }
}

pub(super) fn functional_reduce(it: &Surface) {
    for root in it.everyone() {
        let mine = it.trained(LEN);
        let result = functional::reduce(&mine, root, &it.group).unwrap();
        let expected = if it.me() == root {
            reduced(ReduceOp::Sum, &it.of_all(LEN))
        } else {
            numbers(it.me(), LEN)
        };
        it.is(&result.detach(), &expected);
        it.goes_back(&[result], &mine, &weights(root, 0));
    }
}

pub(super) fn functional_gather(it: &Surface) {
    for root in it.everyone() {
        let mine = it.trained(LEN);
        let results = functional::gather(&mine, root, &it.group).unwrap();
        for (rank, result) in results.iter().enumerate() {
            let sent = numbers(rank, LEN);
            it.is(&result.detach(), if it.me() == root { &sent } else { &[0.0; LEN] });
        }
        it.goes_back(&results, &mine, &weights(root, it.me()));
    }
}

pub(super) fn functional_scatter(it: &Surface) {
    for root in it.everyone() {
        let (whole, list) = it.trained_list();
        let result = functional::scatter(&list, root, &it.group).unwrap();
        it.is(&result.detach(), &row(root, it.me()));
        let of_root: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, 0)).collect();
        let zeros = vec![0.0; of_root.len()];
        it.goes_back(&[result], &whole, if it.me() == root { &of_root } else { &zeros });
    }
}

pub(super) fn functional_all_gather(it: &Surface) {
    let mine = it.trained(LEN);
    let results = functional::all_gather(&mine, &it.group).unwrap();
    for (rank, result) in results.iter().enumerate() {
        it.is(&result.detach(), &numbers(rank, LEN));
    }
    it.goes_back(&results, &mine, &sum(it.everyone().map(|rank| weights(rank, it.me()))));
}

pub(super) fn functional_all_gather_single(it: &Surface) {
    let mine = it.trained(LEN);
    let result = functional::all_gather_single(&mine, &it.group).unwrap();
    it.is(&result.detach(), &it.of_all(LEN).concat());
    let results = result.split(LEN as i64, 0);
    it.goes_back(&results, &mine, &sum(it.everyone().map(|rank| weights(rank, it.me()))));
}

pub(super) fn functional_reduce_scatter(it: &Surface) {
    let (whole, list) = it.trained_list();
    let result = functional::reduce_scatter(&list, &it.group).unwrap();
    it.is(&result.detach(), &sum(it.everyone().map(|rank| row(rank, it.me()))));
    let expected: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, 0)).collect();
    it.goes_back(&[result], &whole, &expected);
}

pub(super) fn functional_all_to_all(it: &Surface) {
    let (whole, list) = it.trained_list();
    let shapes = vec![&[LEN as i64][..]; it.size()];
    let results = functional::all_to_all(&shapes, &list, &it.group).unwrap();
    for (rank, result) in results.iter().enumerate() {
        it.is(&result.detach(), &row(rank, it.me()));
    }
    let expected: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, it.me())).collect();
    it.goes_back(&results, &whole, &expected);
}

pub(super) fn functional_all_to_all_single(it: &Surface) {
    let (whole, _) = it.trained_list();
    let result = functional::all_to_all_single(&whole, None, None, &it.group).unwrap();
    let sent: Vec<f64> = it.everyone().flat_map(|rank| row(rank, it.me())).collect();
    it.is(&result.detach(), &sent);
    let results = result.split(LEN as i64, 0);
    let expected: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, it.me())).collect();
    it.goes_back(&results, &whole, &expected);
}
