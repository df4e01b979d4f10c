//! Groups of some of the ranks.

use ddp_mp::ReduceOp;
use tch::Kind;

use super::{Surface, numbers, reduced, values};

pub(super) fn new_subgroups(it: &Surface) {
    let size = it.size() / 2;
    let half = it.group.new_subgroups(size).unwrap();
    let members: Vec<usize> = (0..it.size()).filter(|rank| rank / size == it.me() / size).collect();
    it.equals(half.ranks().to_vec(), members.clone());
    let mut tensor = it.mine(4, Kind::Float);
    half.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
    let of_members: Vec<_> = members.iter().map(|rank| numbers(*rank, 4)).collect();
    it.is(&tensor, &reduced(ReduceOp::Sum, &of_members));
}

pub(super) fn new_subgroups_by_enumeration(it: &Surface) {
    // The first with the last, across the processes; the others, if there are any, are in none.
    let members = [0, it.size() - 1];
    let group = it.group.new_subgroups_by_enumeration(&[&members]).unwrap();
    it.equals(group.is_some(), members.contains(&it.me()));
    let Some(group) = group else { return };
    let mut tensor = it.mine(4, Kind::Float);
    group.all_reduce(&mut tensor, ReduceOp::Max).unwrap();
    it.is(&tensor, &reduced(ReduceOp::Max, &members.map(|rank| numbers(rank, 4))));
}

pub(super) fn new_group(it: &Surface) {
    // Across the processes, within one, and of one rank.
    let (size, here) = (it.size(), it.of_process);
    for members in [vec![size - 1, 0], (0..here.min(size - 1)).collect(), vec![size - 1]] {
        let group = it.group.new_group(&members).unwrap();
        let mut sorted = members.clone();
        sorted.sort_unstable();
        assert_eq!(group.is_some(), sorted.contains(&it.me()));
        let Some(group) = group else { continue };
        assert_eq!((group.ranks(), sorted[group.rank()]), (&sorted[..], it.me()));
        let mut tensor = it.mine(4, Kind::Float);
        group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
        let of_members: Vec<_> = sorted.iter().map(|rank| numbers(*rank, 4)).collect();
        assert_eq!(values(&tensor), reduced(ReduceOp::Sum, &of_members));
    }
}
