//! Collectives of tensors, and of several tensors at once.

use tch::{Kind, Tensor};

use super::{Surface, numbers, reduced};

pub(super) fn all_reduce(it: &Surface) {
    for (op, kind) in it.reductions(true) {
        let mut tensor = it.mine(6, kind);
        it.group.all_reduce(&mut tensor, op).unwrap();
        it.is(&tensor, &reduced(op, &it.of_all(6)));
    }
}

pub(super) fn reduce(it: &Surface) {
    for (root, (op, kind)) in (0..it.size()).cycle().zip(it.reductions(false)) {
        let mut tensor = it.mine(6, kind);
        it.group.reduce(&mut tensor, root, op).unwrap();
        if it.me() == root {
            it.is(&tensor, &reduced(op, &it.of_all(6)));
        } else {
            it.is(&tensor, &numbers(it.me(), 6)); // as it was
        }
    }
}

pub(super) fn broadcast(it: &Surface) {
    for root in 0..it.size() {
        let mut tensor = it.mine(6, Kind::Float).view([2, 3]);
        it.group.broadcast(&mut tensor, root).unwrap();
        it.is(&tensor, &numbers(root, 6));
    }
}

pub(super) fn all_gather(it: &Surface) {
    let mut list: Vec<Tensor> =
        it.of_all(3).iter().map(|_| it.tensor(&[0.0; 3], Kind::Int)).collect();
    it.group.all_gather(&mut list, &it.mine(3, Kind::Int)).unwrap();
    list.iter().zip(it.of_all(3)).for_each(|(found, expected)| it.is(found, &expected));
}

pub(super) fn all_gather_single(it: &Surface) {
    let mut all = it.tensor(&vec![0.0; it.size() * 3], Kind::Double);
    it.group.all_gather_single(&mut all, &it.mine(3, Kind::Double)).unwrap();
    it.is(&all, &it.of_all(3).concat());
}

pub(super) fn gather(it: &Surface) {
    for root in 0..it.size() {
        let mut list: Vec<Tensor> =
            it.of_all(3).iter().map(|_| it.tensor(&[0.0; 3], Kind::Float)).collect();
        let mine = it.mine(3, Kind::Float);
        it.group.gather(&mine, (it.me() == root).then_some(&mut list[..]), root).unwrap();
        for (found, expected) in list.iter().zip(it.of_all(3)) {
            it.is(found, if it.me() == root { &expected } else { &[0.0; 3] });
        }
    }
}

pub(super) fn scatter(it: &Surface) {
    for root in 0..it.size() {
        let list: Vec<Tensor> = it
            .of_all(3)
            .iter()
            .map(|values| it.tensor(values, Kind::Int64) + root as i64)
            .collect();
        let mut mine = it.tensor(&[0.0; 3], Kind::Int64);
        it.group.scatter(&mut mine, (it.me() == root).then_some(&list[..]), root).unwrap();
        let expected: Vec<f64> = numbers(it.me(), 3).iter().map(|it| it + root as f64).collect();
        it.is(&mine, &expected);
    }
}

/// What each rank has for all: 2 numbers for each rank.
pub(super) fn parts(it: &Surface) -> Vec<Vec<f64>> {
    it.of_all(it.size() * 2)
}

pub(super) fn reduce_scatter(it: &Surface) {
    for (op, kind) in it.reductions(false) {
        let whole = reduced(op, &parts(it));
        let list: Vec<Tensor> =
            parts(it)[it.me()].chunks(2).map(|part| it.tensor(part, kind)).collect();
        let mut output = it.tensor(&[0.0; 2], kind);
        it.group.reduce_scatter(&mut output, &list, op).unwrap();
        it.is(&output, &whole[it.me() * 2..][..2]);
    }
}

pub(super) fn reduce_scatter_single(it: &Surface) {
    for (op, kind) in it.reductions(false) {
        let whole = reduced(op, &parts(it));
        let input = it.tensor(&parts(it)[it.me()], kind);
        let mut output = it.tensor(&[0.0; 2], kind);
        it.group.reduce_scatter_single(&mut output, &input, op).unwrap();
        it.is(&output, &whole[it.me() * 2..][..2]);
    }
}

pub(super) fn all_to_all(it: &Surface) {
    // To rank r go r + 1 numbers.
    let input: Vec<Tensor> =
        (0..it.size()).map(|to| it.mine(to + 1, Kind::Float) + to as f64).collect();
    let mut output: Vec<Tensor> =
        (0..it.size()).map(|_| it.tensor(&vec![0.0; it.me() + 1], Kind::Float)).collect();
    it.group.all_to_all(&mut output, &input).unwrap();
    for (from, found) in output.iter().enumerate() {
        let sent = numbers(from, it.me() + 1);
        it.is(found, &sent.iter().map(|value| value + it.me() as f64).collect::<Vec<_>>());
    }
}

pub(super) fn all_to_all_single(it: &Surface) {
    // Even parts.
    let mut output = it.tensor(&vec![0.0; it.size() * 2], Kind::Int64);
    let input = it.tensor(&parts(it)[it.me()], Kind::Int64);
    it.group.all_to_all_single(&mut output, &input, None, None).unwrap();
    let to_me = |values: &Vec<f64>| values[it.me() * 2..][..2].to_vec();
    it.is(&output, &parts(it).iter().flat_map(to_me).collect::<Vec<_>>());
    // Rank r gets r rows from each.
    let to: Vec<i64> = (0..it.size() as i64).collect();
    let from = vec![it.me() as i64; it.size()];
    let rows = to.iter().sum::<i64>() as usize;
    let mut output = it.tensor(&vec![0.0; it.size() * it.me()], Kind::Float);
    let input = it.mine(rows, Kind::Float);
    it.group.all_to_all_single(&mut output, &input, Some(&from), Some(&to)).unwrap();
    let before = (0..it.me()).sum::<usize>();
    let to_me = |values: &Vec<f64>| values[before..][..it.me()].to_vec();
    it.is(&output, &it.of_all(rows).iter().flat_map(to_me).collect::<Vec<_>>());
}
