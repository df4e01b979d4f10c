//! Draws a few samples as one picture, each with its class and the model's prediction.

/// A square picture that a model was validated on.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Brightness, row by row from the top, on any scale.
    pub pixels: Vec<f32>,
    /// The true class.
    pub class: i64,
    /// The predicted class.
    pub prediction: i64,
}

/// A picture in red, green and blue, row by row from the top.
#[derive(Debug)]
pub(super) struct Picture {
    pub width: u32,
    pub height: u32,
    pub pixels: Vec<u8>,
}

type Color = [u8; 3];
const BACKGROUND: Color = [30, 30, 30];
const RIGHT: Color = [60, 190, 90];
const WRONG: Color = [240, 70, 60];

/// Number of samples in a row.
const COLUMNS: usize = 4;
/// Minimum size of a sample, in pixels.
const SIDE: usize = 96;
const FRAME: usize = 4;
const GAP: usize = 8;

/// Glyphs, three pixels wide and five high, from the top left.
const GLYPHS: [(char, u16); 11] = [
    ('0', 0b111_101_101_101_111),
    ('1', 0b010_110_010_010_111),
    ('2', 0b111_001_111_100_111),
    ('3', 0b111_001_111_001_111),
    ('4', 0b101_101_111_001_001),
    ('5', 0b111_100_111_001_111),
    ('6', 0b111_100_111_101_111),
    ('7', 0b111_001_001_010_010),
    ('8', 0b111_101_111_101_111),
    ('9', 0b111_101_111_001_111),
    ('>', 0b100_010_001_010_100),
];
/// Width of a glyph and of the gap before the next.
const ADVANCE: usize = 4;
const GLYPH_HEIGHT: usize = 5;
/// Maximum size of a glyph's pixel.
const GLYPH_ZOOM: usize = 4;

/// Draws each sample enlarged, in a green frame if the prediction is right, in a red one if it is wrong. The caption
/// `3>5` is a 3 that the model predicts as a 5. `None` without samples, or if they are not square or not of one size.
pub(super) fn picture(samples: &[Sample]) -> Option<Picture> {
    let num_pixels = samples.first()?.pixels.len();
    let side = num_pixels.isqrt();
    if side == 0 || samples.iter().any(|sample| sample.pixels.len() != side * side) {
        return None;
    }
    let zoom = SIDE.div_ceil(side);
    let framed = side * zoom + 2 * FRAME;
    let (across, down) = (framed + GAP, framed + 3 * GAP + GLYPH_HEIGHT * GLYPH_ZOOM);
    let columns = COLUMNS.min(samples.len());
    let rows = samples.len().div_ceil(COLUMNS);
    let mut canvas = Canvas::new(columns * across + GAP, rows * down + GAP);
    let shades = Shades::of(samples);
    for (index, sample) in samples.iter().enumerate() {
        let (x, y) = (index % COLUMNS * across + GAP, index / COLUMNS * down + GAP);
        let color = if sample.prediction == sample.class { RIGHT } else { WRONG };
        canvas.fill(x, y, framed, framed, color);
        for (at, &pixel) in sample.pixels.iter().enumerate() {
            let (x, y) = (x + FRAME + at % side * zoom, y + FRAME + at / side * zoom);
            canvas.fill(x, y, zoom, zoom, [shades.shade(pixel); 3]);
        }
        let caption = format!("{}>{}", sample.class, sample.prediction);
        canvas.write(&caption, x, y + framed + GAP, framed, color);
    }
    let Canvas { width, pixels } = canvas;
    let height = pixels.len() / 3 / width;
    Some(Picture { width: width as u32, height: height as u32, pixels })
}

/// The range from the darkest to the brightest pixel of all samples.
struct Shades {
    darkest: f32,
    brightest: f32,
}

impl Shades {
    fn of(samples: &[Sample]) -> Self {
        let pixels = samples.iter().flat_map(|sample| &sample.pixels);
        let finite = pixels.copied().filter(|pixel| pixel.is_finite());
        let (darkest, brightest) =
            finite.fold((f32::MAX, f32::MIN), |(min, max), pixel| (min.min(pixel), max.max(pixel)));
        Self { darkest, brightest }
    }

    /// Returns the grey level of a pixel. Black for NaN, and where all pixels are the same.
    fn shade(&self, pixel: f32) -> u8 {
        // Halved first: the whole range of float32 would be infinite.
        let share = (pixel / 2. - self.darkest / 2.) / (self.brightest / 2. - self.darkest / 2.);
        (share * 255.).round() as u8
    }
}

struct Canvas {
    width: usize,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(width: usize, height: usize) -> Self {
        Self { width, pixels: BACKGROUND.repeat(width * height) }
    }

    fn fill(&mut self, x: usize, y: usize, width: usize, height: usize, color: Color) {
        for y in y..y + height {
            let row = 3 * (y * self.width + x);
            for pixel in self.pixels[row..row + 3 * width].chunks_exact_mut(3) {
                pixel.copy_from_slice(&color);
            }
        }
    }

    /// Draws `text` in the middle of `width` pixels, as large as it fits. A text that is too long is cut off.
    fn write(&mut self, text: &str, x: usize, y: usize, width: usize, color: Color) {
        let zoom = (width / (text.len() * ADVANCE)).clamp(1, GLYPH_ZOOM);
        let fitting = text.len().min(width / ADVANCE);
        let x = x + (width + zoom - fitting * ADVANCE * zoom) / 2;
        for (index, character) in text.chars().take(fitting).enumerate() {
            let glyph = GLYPHS.iter().find(|(known, _)| *known == character);
            let bits = glyph.map_or(0, |(_, bits)| *bits);
            for at in (0..15).filter(|at| bits >> (14 - at) & 1 == 1) {
                let (x, y) = (x + (index * ADVANCE + at % 3) * zoom, y + at / 3 * zoom);
                self.fill(x, y, zoom, zoom, color);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(pixels: Vec<f32>, class: i64, prediction: i64) -> Sample {
        Sample { pixels, class, prediction }
    }

    impl Picture {
        fn at(&self, x: usize, y: usize) -> Color {
            let at = 3 * (y * self.width as usize + x);
            self.pixels[at..at + 3].try_into().unwrap()
        }
    }

    #[test]
    fn sample_pictures_are_scaled_and_framed_by_result() {
        let two = [sample(vec![0., 1., 2., 3.], 3, 3), sample(vec![3., 3., 3., 0.], 3, 5)];
        let picture = picture(&two).unwrap();
        // Each of the 2 x 2 pixels becomes 48 x 48.
        assert_eq!((picture.width, picture.height), (2 * (8 + 104) + 8, 8 + 104 + 24 + 20));
        assert_eq!(picture.pixels.len() as u32, 3 * picture.width * picture.height);
        let colors = |x: usize| {
            let inner = [(20, 20), (80, 20), (20, 80), (80, 80)];
            (picture.at(x, 8), inner.map(|(dx, y)| picture.at(x + dx, y + 8)[0]))
        };
        assert_eq!(colors(8), (RIGHT, [0, 85, 170, 255]));
        assert_eq!(colors(120), (WRONG, [255, 255, 255, 0]));
        assert_eq!(picture.at(0, 0), BACKGROUND);
    }

    #[test]
    fn caption_has_class_and_prediction() {
        let mut canvas = Canvas::new(12, 5);
        canvas.write("3>5", 0, 0, 12, RIGHT);
        let drawn = |(index, pixel): (usize, &[u8])| {
            let end = if (index + 1).is_multiple_of(12) { "\n" } else { "" };
            format!("{}{end}", if pixel == RIGHT { '#' } else { ' ' })
        };
        let text: String = canvas.pixels.chunks(3).enumerate().map(drawn).collect();
        assert_eq!(text, "### #   ### \n  #  #  #   \n###   # ### \n  #  #    # \n### #   ### \n");
    }

    #[test]
    fn nonfinite_and_huge_samples_are_drawn() {
        let awkward = [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN];
        let pictures = [
            picture(&vec![sample(awkward.to_vec(), i64::MAX, i64::MIN); 9]),
            picture(&[sample(vec![f32::NAN], 0, 0)]),
            picture(&[sample(vec![1.; 200 * 200], 123, 4567)]),
        ];
        assert!(pictures.iter().all(Option::is_some));
        assert!(picture(&[]).is_none() && picture(&[sample(vec![], 0, 0)]).is_none());
        assert!(picture(&[sample(vec![0.; 20], 0, 0)]).is_none(), "not a square");
        let sizes = [sample(vec![0.; 4], 0, 0), sample(vec![0.; 9], 0, 0)];
        assert!(picture(&sizes).is_none());
    }
}
