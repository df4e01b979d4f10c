//! The points of a curve, of which a long run would have too many.

use std::ops::Deref;

use serde::Serialize;

/// A curve of at most `MOST` points, an even number. Once it has so many, it keeps every second of them, and takes every
/// second from then on, later every fourth, and so on: its points are evenly spread, but for the newest, which is always
/// there.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Curve<T, const MOST: usize> {
    points: Vec<T>,
    /// How many points were given.
    #[serde(skip)]
    given: usize,
    /// How often every second point was dropped.
    #[serde(skip)]
    halvings: u32,
}

impl<T, const MOST: usize> Curve<T, MOST> {
    /// Adds a point.
    pub(crate) fn add(&mut self, point: T) {
        if !self.given.saturating_sub(1).is_multiple_of(1 << self.halvings) {
            self.points.pop(); // it was there as the newest only
        }
        if self.points.len() >= MOST {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.halvings += 1;
        }
        self.points.push(point);
        self.given += 1;
    }
}

impl<T, const MOST: usize> FromIterator<T> for Curve<T, MOST> {
    fn from_iter<I: IntoIterator<Item = T>>(points: I) -> Self {
        let mut curve = Self { points: Vec::new(), given: 0, halvings: 0 };
        points.into_iter().for_each(|point| curve.add(point));
        curve
    }
}

impl<T, const MOST: usize> Deref for Curve<T, MOST> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_stay_evenly_spread() {
        let mut curve = Curve::<usize, 10>::default();
        for point in 0..1000 {
            curve.add(point);
            let [earlier @ .., newest] = &curve[..] else { panic!("no point") };
            assert_eq!(*newest, point);
            let stride = 1 << curve.halvings;
            let is_spread = earlier.iter().enumerate().all(|(at, kept)| *kept == at * stride);
            let is_full = point < 10 || curve.len() > 5;
            assert!(is_spread && is_full && curve.len() <= 10, "{curve:?}");
        }
    }
}
