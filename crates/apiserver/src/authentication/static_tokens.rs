//! `--token-auth-file`: a CSV file with tokens and users, read at startup.

use std::collections::HashMap;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::Error;
use crate::access::User;

/// Users by digest of their token, so that lookup time does not depend on how much of a guess is
/// right.
#[derive(Default)]
pub struct StaticTokens(HashMap<[u8; 32], User>);

impl StaticTokens {
    pub fn read(path: &Path) -> Result<StaticTokens, Error> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| Error::Read { path: path.to_owned(), source })?;
        StaticTokens::parse(&text).map_err(|(line, reason)| Error::TokenFile {
            path: path.to_owned(),
            line,
            reason,
        })
    }

    pub fn authenticate_token(&self, token: &str) -> Option<&User> {
        // Skip the digest in the common case without a token file.
        if self.0.is_empty() { None } else { self.0.get(&digest(token)) }
    }

    fn parse(text: &str) -> Result<StaticTokens, (usize, &'static str)> {
        let mut tokens = HashMap::new();
        for (line, record) in records(text)? {
            let [token, name, uid, rest @ ..] = record.as_slice() else {
                return Err((line, "must have at least 3 columns (token, user name, user uid)"));
            };
            if token.is_empty() {
                tracing::warn!(line, "empty token in token file ignored");
                continue;
            }
            let groups = rest.first().map(|groups| groups.split(',').map(str::to_owned).collect());
            let user = User {
                name: name.clone(),
                uid: uid.clone(),
                groups: groups.unwrap_or_default(),
                ..User::default()
            };
            if tokens.insert(digest(token), user).is_some() {
                tracing::warn!(line, "duplicate token in token file, the last entry wins");
            }
        }
        Ok(StaticTokens(tokens))
    }
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}

type Record = (usize, Vec<String>);

/// The records of a CSV file with their line numbers; empty lines are skipped.
fn records(text: &str) -> Result<Vec<Record>, (usize, &'static str)> {
    let mut records = Vec::new();
    let (mut line, mut rest) = (1, text);
    while !rest.is_empty() {
        let start = line;
        let mut fields = Vec::new();
        loop {
            let (field, after) = field(rest).ok_or((start, "unclosed or misplaced quote"))?;
            line += rest[..rest.len() - after.len()].matches('\n').count();
            fields.push(field);
            rest = after;
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        rest = rest.strip_prefix('\r').unwrap_or(rest);
        if let Some(more) = rest.strip_prefix('\n') {
            (line, rest) = (line + 1, more);
        }
        if fields != [""] {
            records.push((start, fields));
        }
    }
    Ok(records)
}

/// One field, and the rest from the comma or end of line on.
fn field(text: &str) -> Option<(String, &str)> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.find([',', '\n']).unwrap_or(text.len());
        let field = text[..end].strip_suffix('\r').unwrap_or(&text[..end]);
        return (!field.contains('"')).then(|| (field.to_owned(), &text[end..]));
    };
    let mut field = String::new();
    loop {
        let end = rest.find('"')?;
        field.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        match rest.strip_prefix('"') {
            Some(more) => {
                field.push('"');
                rest = more;
            }
            None => break,
        }
    }
    let ends = rest.is_empty() || rest.starts_with([',', '\n']) || rest.starts_with("\r\n");
    ends.then_some((field, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &str) {
        let rendered = match records(text) {
            Ok(records) => {
                records.iter().map(|(line, fields)| format!("{line}:{}", fields.join("|"))).collect()
            }
            Err((line, reason)) => vec![format!("{line}! {reason}")],
        };
        assert_eq!(rendered.join(" "), expected);
    }

    #[test]
    fn reads_records() {
        check("", "");
        check("a,b,c\nd,e,f", "1:a|b|c 2:d|e|f");
        check("a,b,c\r\n\r\n\nd,,\"x,y\"\r\n", "1:a|b|c 4:d||x,y");
        check("\"a\"\"b\",\"c\nd\"\ne", "1:a\"b|c\nd 3:e");
        check("a,", "1:a|");
        check("a\n\"b", "2! unclosed or misplaced quote");
        check("a\"b", "1! unclosed or misplaced quote");
        check("\"a\"b", "1! unclosed or misplaced quote");
    }

    #[test]
    fn maps_tokens_to_users() {
        let tokens = StaticTokens::parse("t1,ann,1\n,empty,2\nt3,bob,3,\"dev,ops\"\nt1,eve,4\n").unwrap();
        let user = tokens.authenticate_token("t3").unwrap();
        assert_eq!((user.name.as_str(), user.uid.as_str()), ("bob", "3"));
        assert_eq!(user.groups, ["dev", "ops"]);
        assert_eq!(tokens.authenticate_token("t1").unwrap().name, "eve");
        assert!(tokens.authenticate_token("").is_none() && tokens.authenticate_token("t2").is_none());
        assert_eq!(
            StaticTokens::parse("secret,ann").err(),
            Some((1, "must have at least 3 columns (token, user name, user uid)"))
        );
    }
}
