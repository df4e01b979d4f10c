//! `ddp-mp lesson`: every check accepts the answer of a run and refuses another; the book shows the same exercises.

use std::fs;
use std::sync::LazyLock;

use crate::harness::{in_parallel, repository, run, run_all_refused, run_to, some_of};

/// What a user types for each lesson, in the order of the list.
static LESSONS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let (list, _) = run_to(0, &["lesson"]);
    let rows = list.lines().filter_map(|line| line.strip_prefix("  "));
    let ids: Vec<String> =
        rows.map(|row| row.split_whitespace().next().unwrap().to_owned()).collect();
    assert!(ids.len() > 15, "{list}");
    ids
});

/// Runs `ddp-mp lesson`, which must end with this exit code, and returns its stdout.
fn lesson(code: i32, args: &[&str]) -> String {
    let (stdout, stderr) = run_to(code, &[&["lesson"], args].concat());
    assert_eq!(stderr, "", "{args:?}");
    stdout
}

/// Returns the answer that a run gives; `None` if no run can check this lesson.
fn solution(id: &str) -> Option<String> {
    let stdout = lesson(0, &[id, "--solution"]);
    let answer = stdout.lines().next().unwrap().strip_prefix("Answer: ")?.to_owned();
    for part in ["\n  Measured: ", "\n  Why: "] {
        assert!(stdout.contains(part), "{id}: {stdout}");
    }
    assert!(!stdout.contains(['{', '}']), "{id}: {stdout}");
    Some(answer)
}

/// Returns an answer in the same form that is not `right`.
fn wrong(right: &str) -> String {
    match right {
        "yes" => "no".into(),
        "no" => "yes".into(),
        _ => {
            let (first, rest) = right.split_once(' ').unwrap_or((right, ""));
            let other = match first.parse::<u64>() {
                Ok(number) => (number + 1).to_string(),
                Err(_) => (first.parse::<f64>().unwrap() + 0.1).to_string(),
            };
            format!("{other} {rest}").trim_end().to_owned()
        }
    }
}

#[test]
fn checks_accept_the_answer_of_a_run_and_refuse_another() {
    in_parallel(&some_of(LESSONS.clone(), 2), |id| {
        let Some(solution) = solution(id) else {
            assert_eq!(id, "2", "a race has no answer of its own");
            return;
        };
        // Lesson 6 measures times, which other processes may change: each of its runs has several tries.
        let (right, tries) = if id == "6" { ("1 100".to_owned(), 5) } else { (solution, 1) };
        let answer = ["lesson", id, &format!("--answer={right}")];
        let mut answers = (0..tries).map(|_| run(&answer));
        let (_, stdout, stderr) = answers.find(|(code, ..)| *code == Some(0)).expect(id);
        assert_eq!(stderr, "", "{id}");
        assert!(stdout.starts_with(&format!("Right: {right}\n")), "{id}: {stdout}");
        let stdout = lesson(1, &[id, &format!("--answer={}", wrong(&right))]);
        assert!(stdout.starts_with("Not right: "), "{id}: {stdout}");
        assert!(stdout.contains("\n  Hint: ") && !stdout.contains("Measured"), "{id}: {stdout}");
    });
}

#[test]
fn wrong_input_is_told_with_the_form_of_an_answer() {
    let wrong = [
        ("lesson 0", "there is no such lesson; use one of demo, "),
        ("lesson demo --answer=", "lesson demo: expected a whole number, not \"\""),
        ("lesson demo --answer -43", "expected a whole number"),
        ("lesson 3 --answer=1792", "lesson 3: expected 2 whole numbers with a space between them"),
        ("lesson update --answer=nan", "expected a number such as 0.5, not \"nan\""),
        ("lesson batch --answer=perhaps", "expected yes or no, not \"perhaps\""),
        ("lesson 2 --answer=3", "lesson 2 has no check. A race gives a different result each time"),
        ("lesson --answer=43", "<LESSON>"),
        ("lesson demo --answer=43 --solution", "cannot be used with"),
    ];
    run_all_refused(&some_of(wrong, 3));
}

#[test]
fn answers_in_chinese_are_those_in_english() {
    let stdout = lesson(0, &["batch", "--language=zh", "--answer=否"]);
    assert!(stdout.starts_with("正确：否\n"), "{stdout}");
    let stdout = lesson(1, &["batch", "--language=zh", "--answer=yes"]);
    assert!(stdout.starts_with("不对：是\n  提示："), "{stdout}");
}

/// `text` without its line breaks, spaces and backticks: what a page and a terminal have in common.
fn squeezed(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace() && *c != '`').collect()
}

/// Returns the exercise in what a lesson prints: it leaves out the heading, the program and the last line.
fn exercise(id: &str, stdout: &str) -> String {
    let lines: Vec<&str> = stdout.lines().collect();
    let (last, others) = lines.split_last().unwrap();
    assert!(last.ends_with(&format!("ddp-mp lesson {id} --solution")), "{last}");
    let is_program = |line: &&&str| line.contains("examples/") || line.contains("--example");
    let programs = others.iter().filter(is_program).count();
    assert_eq!(programs, if id.parse::<usize>().is_ok() { 2 } else { 0 }, "{stdout}");
    others[1 + programs..].join("\n")
}

#[test]
fn book_shows_every_exercise_in_the_order_of_the_list() {
    let summary = fs::read_to_string(repository("docs/src/SUMMARY.md")).unwrap();
    for (folder, language, mark) in
        some_of([("tutorial", "en", "**Exercise.**"), ("zh", "zh", "**练习。**")], 1)
    {
        let folder_of_links = format!("({folder}/");
        let links = summary.split(&folder_of_links).skip(1);
        let pages =
            links.map(|link| format!("docs/src/{folder}/{}", link.split(')').next().unwrap()));
        let text: String =
            pages.map(|page| fs::read_to_string(repository(&page)).unwrap()).collect();
        let shown: Vec<String> = text
            .split(mark)
            .skip(1)
            .map(|rest| squeezed(rest.split("\n\n").next().unwrap()))
            .collect();
        assert_eq!(shown.len(), LESSONS.len(), "exercises of docs/src/{folder}");
        for (shown, id) in some_of(shown.iter().zip(&*LESSONS), 4) {
            let stdout = lesson(0, &[id, "--language", language]);
            let expected = squeezed(&exercise(id, &stdout));
            assert_eq!(
                *shown, expected,
                "a page of docs/src/{folder}, and what the program prints"
            );
        }
    }
}

#[test]
fn lines_to_change_are_marked_in_the_examples() {
    let files = fs::read_dir(repository("examples")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let programs: Vec<String> =
        names.filter(|name| name.starts_with(|c: char| c.is_ascii_digit())).collect();
    let numbered = LESSONS.iter().filter(|id| id.parse::<usize>().is_ok());
    assert_eq!(numbered.count(), programs.len(), "each program has its exercise");
    for program in some_of(programs, 2) {
        let (number, name) = program.trim_end_matches(".rs").split_once('-').unwrap();
        let id = number.trim_start_matches('0');
        let question = lesson(0, &[id]);
        assert_eq!(question, lesson(0, &[name]), "{program}");
        assert!(question.contains(&format!("  Program: examples/{program}\n")), "{question:?}");
        let text = fs::read_to_string(repository(&format!("examples/{program}"))).unwrap();
        let marked: Vec<&str> = text.lines().filter(|line| line.contains("// exercise")).collect();
        let exercise = exercise(id, &question).split_whitespace().collect::<Vec<_>>().join(" ");
        let code = exercise.split('`').nth(1).unwrap();
        if code.starts_with("ddp-mp ") {
            assert_eq!(marked.len(), 0, "{program}: its exercise changes a command");
        } else {
            assert_eq!(marked.len(), 1, "{program}: {marked:?}");
            assert!(marked[0].contains(code), "{program}: {code:?} is not in {:?}", marked[0]);
        }
    }
}
