//! What upstream says about a pattern that is none: Go's words, for the first thing Go would stumble over.

/// So often something may be repeated by a number.
const MOST_REPEATS: u32 = 1000;
const CLASSES: [&str; 14] = [
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space",
    "upper", "word", "xdigit",
];

/// What is wrong, with the part of the pattern that is; `None` if Go would take it.
pub fn complaint(pattern: &str) -> Option<String> {
    let mut scan = Scan { pattern, at: 0, open: 0, repeatable: false, repeated: None };
    let (reason, part) = scan.run().err()?;
    Some(format!("error parsing regexp: {reason}: `{part}`"))
}

type Wrong<'p> = (&'static str, &'p str);

const BRACKET: &str = "missing closing ]";
const ESCAPE: &str = "invalid escape sequence";
const RANGE: &str = "invalid character class range";

struct Scan<'p> {
    pattern: &'p str,
    at: usize,
    /// Groups that are open.
    open: usize,
    /// There is something before that can be repeated.
    repeatable: bool,
    /// Where the repetition just before begins.
    repeated: Option<usize>,
}

impl<'p> Scan<'p> {
    fn rest(&self) -> &'p str {
        &self.pattern[self.at..]
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest().chars().next()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn since(&self, start: usize) -> &'p str {
        &self.pattern[start..self.at]
    }

    fn run(&mut self) -> Result<(), Wrong<'p>> {
        while let Some(next) = self.rest().chars().next() {
            let start = self.at;
            let mut repetition = None;
            match next {
                '(' => {
                    self.group()?;
                    self.repeatable = false;
                    self.repeated = None;
                    continue;
                }
                ')' => {
                    self.next();
                    self.open = self.open.checked_sub(1).ok_or(("unexpected )", self.pattern))?;
                    self.repeatable = true;
                }
                '|' => {
                    self.next();
                    self.repeatable = false;
                }
                '[' => {
                    self.class()?;
                    self.repeatable = true;
                }
                '*' | '+' | '?' => {
                    self.next();
                    repetition = Some(start);
                }
                '{' => match self.counts() {
                    Some((least, most)) => {
                        if least > MOST_REPEATS
                            || most.is_some_and(|most| most > MOST_REPEATS || most < least)
                        {
                            return Err(("invalid repeat count", self.since(start)));
                        }
                        repetition = Some(start);
                    }
                    None => {
                        self.next();
                        self.repeatable = true;
                    }
                },
                '\\' => {
                    self.escape(false)?;
                    self.repeatable = true;
                }
                _ => {
                    self.next();
                    self.repeatable = true;
                }
            }
            if let Some(start) = repetition {
                if !self.repeatable {
                    return Err(("missing argument to repetition operator", self.since(start)));
                }
                if self.rest().starts_with('?') {
                    self.next();
                }
                if let Some(first) = self.repeated {
                    return Err(("invalid nested repetition operator", self.since(first)));
                }
            }
            self.repeated = repetition;
        }
        match self.open {
            0 => Ok(()),
            _ => Err(("missing closing )", self.pattern)),
        }
    }

    fn group(&mut self) -> Result<(), Wrong<'p>> {
        let start = self.at;
        self.next();
        if !self.rest().starts_with('?') {
            self.open += 1;
            return Ok(());
        }
        self.next();
        let named = ["P<", "<"].into_iter().find(|begin| self.rest().starts_with(begin));
        if let Some(begin) = named {
            let Some(end) = self.rest().find('>') else {
                return Err(("invalid named capture", &self.pattern[start..]));
            };
            let name = &self.rest()[begin.len()..end];
            self.at += end + 1;
            if name.is_empty() || !name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric()) {
                return Err(("invalid named capture", self.since(start)));
            }
            self.open += 1;
            return Ok(());
        }
        let (mut off, mut flags) = (false, false);
        while let Some(next) = self.next() {
            match next {
                'i' | 'm' | 's' | 'U' => flags = true,
                '-' if !off => (off, flags) = (true, false),
                ':' | ')' if !off || flags => {
                    self.open += usize::from(next == ':');
                    return Ok(());
                }
                _ => return Err(("invalid or unsupported Perl syntax", self.since(start))),
            }
        }
        Err(("missing closing )", &self.pattern[start..]))
    }

    fn class(&mut self) -> Result<(), Wrong<'p>> {
        let whole = self.rest();
        self.next();
        if self.rest().starts_with('^') {
            self.next();
        }
        let mut first = true;
        loop {
            let start = self.at;
            match self.rest().chars().next() {
                None => return Err((BRACKET, whole)),
                Some(']') if !first => {
                    self.next();
                    return Ok(());
                }
                Some('[') if self.rest().starts_with("[:") && self.rest().contains(":]") => {
                    self.at += self.rest().find(":]").unwrap_or(0) + 2;
                    let name = self.since(start);
                    let known = name.trim_start_matches("[:").trim_start_matches('^').trim_end_matches(":]");
                    if !CLASSES.contains(&known) {
                        return Err((RANGE, name));
                    }
                    first = false;
                    continue;
                }
                Some(_) => {}
            }
            first = false;
            let Some(low) = self.character(whole)? else { continue };
            let mut ahead = self.rest().chars();
            if ahead.next() == Some('-') && ahead.next().is_some_and(|next| next != ']') {
                self.next();
                if let Some(high) = self.character(whole)?
                    && high < low
                {
                    return Err((RANGE, self.since(start)));
                }
            }
        }
    }

    /// One character of a class; `None` for a class in it.
    fn character(&mut self, whole: &'p str) -> Result<Option<char>, Wrong<'p>> {
        match self.rest().chars().next() {
            None => Err((BRACKET, whole)),
            Some('\\') => self.escape(true),
            Some(_) => Ok(self.next()),
        }
    }

    /// What an escape stands for, if that is one character.
    fn escape(&mut self, in_class: bool) -> Result<Option<char>, Wrong<'p>> {
        let start = self.at;
        self.next();
        let Some(next) = self.next() else { return Err(("trailing backslash at end of expression", "")) };
        match next {
            'd' | 'D' | 's' | 'S' | 'w' | 'W' => Ok(None),
            'A' | 'b' | 'B' | 'z' if !in_class => Ok(None),
            'Q' if !in_class => {
                let literal = self.rest();
                self.at += literal.find("\\E").map_or(literal.len(), |end| end + 2);
                Ok(None)
            }
            'p' | 'P' => {
                let length = match self.rest().strip_prefix('{') {
                    Some(name) => name.find('}').map(|end| end + 2),
                    None => self.rest().chars().next().map(char::len_utf8),
                };
                self.at = length.map_or(self.pattern.len(), |length| self.at + length);
                match length.is_some() && ::regex::Regex::new(self.since(start)).is_ok() {
                    true => Ok(None),
                    false => Err((RANGE, self.since(start))),
                }
            }
            '0'..='7' => {
                if next != '0' && !self.rest().starts_with(|next: char| ('0'..='7').contains(&next)) {
                    return Err((ESCAPE, self.since(start)));
                }
                let mut value = next.to_digit(8).unwrap_or(0);
                for _ in 0..2 {
                    let Some(digit) = self.rest().chars().next().and_then(|digit| digit.to_digit(8)) else {
                        break;
                    };
                    self.next();
                    value = value * 8 + digit;
                }
                Ok(char::from_u32(value))
            }
            'x' => self.hex(start),
            'a' => Ok(Some('\u{7}')),
            'f' => Ok(Some('\u{c}')),
            'n' => Ok(Some('\n')),
            'r' => Ok(Some('\r')),
            't' => Ok(Some('\t')),
            'v' => Ok(Some('\u{b}')),
            next if next.is_ascii_punctuation() => Ok(Some(next)),
            _ => Err((ESCAPE, self.since(start))),
        }
    }

    fn hex(&mut self, start: usize) -> Result<Option<char>, Wrong<'p>> {
        let digits = match self.rest().strip_prefix('{') {
            Some(name) => {
                let end = name.find('}').ok_or((ESCAPE, &self.pattern[start..]))?;
                self.at += end + 2;
                &name[..end]
            }
            None => {
                let rest = self.rest();
                let length = rest.char_indices().nth(2).map_or(rest.len(), |(at, _)| at);
                self.at += length;
                &rest[..length]
            }
        };
        let value = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32);
        value.map(Some).ok_or((ESCAPE, self.since(start)))
    }

    /// `{2}`, `{2,}` or `{2,4}`, past which this goes; anything else stands for itself.
    fn counts(&mut self) -> Option<(u32, Option<u32>)> {
        let (inner, _) = self.rest().strip_prefix('{')?.split_once('}')?;
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
            digits.then(|| text.parse().unwrap_or(u32::MAX))
        };
        let counts = match inner.split_once(',') {
            None => (number(inner)?, Some(number(inner)?)),
            Some((least, "")) => (number(least)?, None),
            Some((least, most)) => (number(least)?, Some(number(most)?)),
        };
        self.at += inner.len() + 2;
        Some(counts)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(pattern: &str, expected: &str) {
        let found = complaint(pattern).unwrap_or_default();
        assert_eq!(found.trim_start_matches("error parsing regexp: "), expected, "{pattern}");
    }

    #[test]
    fn patterns_that_are_none() {
        check("(", "missing closing ): `(`");
        check("a(b|c", "missing closing ): `a(b|c`");
        check("a)b", "unexpected ): `a)b`");
        check("x[a-", "missing closing ]: `[a-`");
        check("[]", "missing closing ]: `[]`");
        check("[z-a]", "invalid character class range: `z-a`");
        check("[[:nope:]]", "invalid character class range: `[:nope:]`");
        check(r"\p{Nope}", r"invalid character class range: `\p{Nope}`");
        check("*", "missing argument to repetition operator: `*`");
        check("+,x", "missing argument to repetition operator: `+`");
        check("a|*", "missing argument to repetition operator: `*`");
        check("a**", "invalid nested repetition operator: `**`");
        check("a{2,1}", "invalid repeat count: `{2,1}`");
        check("a{1001}", "invalid repeat count: `{1001}`");
        check(r"\y", r"invalid escape sequence: `\y`");
        check(r"(a)\1", r"invalid escape sequence: `\1`");
        check(r"a\", "trailing backslash at end of expression: ``");
        check("(?=a)", "invalid or unsupported Perl syntax: `(?=`");
        check("^(?!a)", "invalid or unsupported Perl syntax: `(?!`");
        check("(?<=a)", "invalid named capture: `(?<=a)`");
        check("(?P<n", "invalid named capture: `(?P<n`");
    }

    #[test]
    fn patterns_that_are_good() {
        for pattern in [
            "",
            "^a+?$",
            r"^\d{1,3}(\.\d+)*$",
            "[]a]",
            "[^]a]",
            "[[:alpha:]_-]",
            r"[\w.-]",
            "(?i)x",
            "(?P<n>a)|b",
            "(?<n>a)",
            "a{,2}",
            "{",
            "x{2}y",
            r"\Qa(b\E",
            r"\x41\x{1F600}\012",
            r"[a\-z]",
            r"\pL",
            "(?:a|b)+",
            "(|a)",
            "(a)?b*",
            "(?i-s:a)",
        ] {
            check(pattern, "");
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_stumble(pattern in r"[\\(\[\])*+?{}0-9a-z^:,<>=!|.p-]{0,12}") {
            complaint(&pattern);
        }
    }
}
