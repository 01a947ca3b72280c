//! Upstream's AuthenticationConfiguration: issuers of JWTs, and where requests may be anonymous.
//!
//! Read strictly: an unknown field is an error, since what is misspelt here lets people in or keeps them
//! out. So are expressions that cannot be compiled.

use std::collections::BTreeSet;
use std::path::Path;

use api::field::quoted;
use serde::Deserialize;

use super::Error;
use super::oidc::expressions::Programs;
use super::options::Anonymous;

const VERSIONS: [&str; 3] =
    ["apiserver.config.k8s.io/v1", "apiserver.config.k8s.io/v1beta1", "apiserver.config.k8s.io/v1alpha1"];
const MOST_ISSUERS: usize = 64;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Configuration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    pub jwt: Vec<Jwt>,
    #[serde(default)]
    pub anonymous: Option<AnonymousRule>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnonymousRule {
    enabled: bool,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    path: String,
}

/// One issuer of tokens, and what their claims mean.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Jwt {
    pub issuer: Issuer,
    #[serde(default)]
    pub claim_validation_rules: Vec<ClaimRule>,
    pub claim_mappings: Mappings,
    #[serde(default)]
    pub user_validation_rules: Vec<UserRule>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Issuer {
    pub url: String,
    #[serde(default, rename = "discoveryURL")]
    pub discovery_url: Option<String>,
    /// PEM; empty trusts what the machine trusts.
    #[serde(default)]
    pub certificate_authority: String,
    pub audiences: Vec<String>,
    #[serde(default)]
    pub audience_match_policy: String,
    #[serde(default)]
    egress_selector_type: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ClaimRule {
    #[serde(default)]
    pub claim: String,
    #[serde(default)]
    pub required_value: String,
    #[serde(default)]
    pub expression: String,
    #[serde(default)]
    pub message: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mappings {
    pub username: Prefixed,
    #[serde(default)]
    pub groups: Prefixed,
    #[serde(default)]
    pub uid: Claim,
    #[serde(default)]
    pub extra: Vec<Extra>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prefixed {
    #[serde(default)]
    pub claim: String,
    #[serde(default)]
    pub prefix: Option<String>,
    #[serde(default)]
    pub expression: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    #[serde(default)]
    pub claim: String,
    #[serde(default)]
    pub expression: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Extra {
    pub key: String,
    pub value_expression: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserRule {
    pub expression: String,
    #[serde(default)]
    pub message: String,
}

impl Prefixed {
    pub fn new(claim: &str, prefix: &str) -> Prefixed {
        Prefixed { claim: claim.to_owned(), prefix: Some(prefix.to_owned()), expression: String::new() }
    }
}

impl ClaimRule {
    pub fn required(claim: &str, value: &str) -> ClaimRule {
        ClaimRule { claim: claim.to_owned(), required_value: value.to_owned(), ..ClaimRule::default() }
    }
}

impl AnonymousRule {
    pub fn meaning(&self) -> Anonymous {
        let paths = || self.conditions.iter().map(|condition| condition.path.clone()).collect();
        match (self.enabled, self.conditions.is_empty()) {
            (false, _) => Anonymous::Nowhere,
            (true, true) => Anonymous::Everywhere,
            (true, false) => Anonymous::Paths(paths()),
        }
    }
}

impl Configuration {
    pub fn read(path: &Path) -> Result<Configuration, Error> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let bad = |why: String| Error::Configuration { path: path.to_owned(), why };
        Configuration::parse(&text).map_err(bad)
    }

    pub fn parse(text: &str) -> Result<Configuration, String> {
        let configuration: Configuration = schema::yaml::read(text).map_err(|error| error.to_string())?;
        if configuration.kind != "AuthenticationConfiguration"
            || !VERSIONS.contains(&configuration.api_version.as_str())
        {
            return Err(format!(
                "expected AuthenticationConfiguration of {}, not {} of {}",
                VERSIONS[0],
                quoted(&configuration.kind),
                quoted(&configuration.api_version)
            ));
        }
        Ok(configuration)
    }

    /// What is wrong, in upstream's words; `ours` are the service accounts' issuers.
    pub fn check(&self, ours: &[String]) -> Result<(), Error> {
        let mut problems = Vec::new();
        if self.jwt.len() > MOST_ISSUERS {
            problems.push(format!("jwt: Too many: {}: must have at most 64 items", self.jwt.len()));
        }
        let mut seen = BTreeSet::new();
        for (i, jwt) in self.jwt.iter().enumerate() {
            jwt.check(&format!("jwt[{i}]"), ours, &mut problems);
            for (field, url) in
                [("url", Some(&jwt.issuer.url)), ("discoveryURL", jwt.issuer.discovery_url.as_ref())]
            {
                let Some(url) = url.filter(|url| !url.is_empty()) else { continue };
                if !seen.insert((field, url)) {
                    problems.push(format!("jwt[{i}].issuer.{field}: Duplicate value: {}", quoted(url)));
                }
            }
        }
        if let Some(rule) = &self.anonymous
            && !rule.enabled
            && !rule.conditions.is_empty()
        {
            problems.push(
                "anonymous.conditions: enabled should be set to true when conditions are defined".to_owned(),
            );
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::Invalid(crate::rbac::together(&problems))) }
    }
}

impl Jwt {
    fn check(&self, at: &str, ours: &[String], problems: &mut Vec<String>) {
        let issuer = &self.issuer;
        let invalid = |field: &str, value: &str, why: &str| {
            format!("{at}.{field}: Invalid value: {}: {why}", quoted(value))
        };
        if issuer.url.is_empty() {
            problems.push(format!("{at}.issuer.url: Required value"));
        } else {
            if ours.contains(&issuer.url) {
                let why = format!("URL must not overlap with disallowed issuers: [{}]", ours.join(" "));
                problems.push(invalid("issuer.url", &issuer.url, &why));
            }
            problems.extend(url_problems(&issuer.url).map(|why| invalid("issuer.url", &issuer.url, why)));
        }
        if let Some(url) = issuer.discovery_url.as_ref().filter(|url| !url.is_empty()) {
            if url.trim_end_matches('/') == issuer.url.trim_end_matches('/') {
                problems.push(invalid("issuer.discoveryURL", url, "discoveryURL must be different from URL"));
            }
            problems.extend(url_problems(url).map(|why| invalid("issuer.discoveryURL", url, why)));
        }
        if issuer.audiences.is_empty() {
            problems.push(format!(
                "{at}.issuer.audiences: Required value: at least one {at}.issuer.audiences is required"
            ));
        }
        let mut seen = BTreeSet::new();
        for (i, audience) in issuer.audiences.iter().enumerate() {
            if audience.is_empty() {
                problems.push(format!("{at}.issuer.audiences[{i}]: Required value"));
            } else if !seen.insert(audience) {
                problems.push(format!("{at}.issuer.audiences[{i}]: Duplicate value: {}", quoted(audience)));
            }
        }
        let policy = issuer.audience_match_policy.as_str();
        let field = "issuer.audienceMatchPolicy";
        if issuer.audiences.len() > 1 && policy != "MatchAny" {
            let why = "audienceMatchPolicy must be MatchAny for multiple audiences";
            problems.push(invalid(field, policy, why));
        }
        if issuer.audiences.len() == 1 && !matches!(policy, "" | "MatchAny") {
            let why = "audienceMatchPolicy must be empty or MatchAny for single audience";
            problems.push(invalid(field, policy, why));
        }
        if !issuer.egress_selector_type.is_empty() {
            let why = "there are no egress selectors here";
            problems.push(invalid("issuer.egressSelectorType", &issuer.egress_selector_type, why));
        }
        self.check_claims(at, problems);
    }

    fn check_claims(&self, at: &str, problems: &mut Vec<String>) {
        let mappings = &self.claim_mappings;
        Programs::new(self, at, problems);
        for (name, mapping) in [("username", &mappings.username), ("groups", &mappings.groups)] {
            let field = format!("{at}.claimMappings.{name}");
            match (mapping.claim.is_empty(), mapping.expression.is_empty(), &mapping.prefix) {
                (false, false, _) => problems
                    .push(format!("{field}: Invalid value: \"\": claim and expression can't both be set")),
                (true, false, Some(prefix)) => problems.push(format!(
                    "{field}.prefix: Invalid value: {}: prefix can't be set when expression is set",
                    quoted(prefix)
                )),
                (true, true, _) if name == "username" => {
                    problems.push(format!("{field}: Required value: claim or expression is required"));
                }
                (true, true, Some(prefix)) if !prefix.is_empty() => {
                    problems.push(format!("{field}.claim: Required value: non-empty claim name is required"));
                }
                (false, _, None) => {
                    let why = "prefix is required when claim is set. It can be set to an empty string to disable prefixing";
                    problems.push(format!("{field}.prefix: Required value: {why}"));
                }
                _ => {}
            }
        }
        let mut seen = BTreeSet::new();
        for (i, rule) in self.claim_validation_rules.iter().enumerate() {
            let field = format!("{at}.claimValidationRules[{i}]");
            match (rule.claim.as_str(), rule.expression.as_str()) {
                ("", "") => {
                    problems.push(format!("{field}: Required value: claim or expression is required"))
                }
                (claim, "") => {
                    if !rule.message.is_empty() {
                        let why = "may not be specified when claim is set";
                        problems.push(format!(
                            "{field}.message: Invalid value: {}: {why}",
                            quoted(&rule.message)
                        ));
                    }
                    if !seen.insert(claim) {
                        problems.push(format!("{field}.claim: Duplicate value: {}", quoted(claim)));
                    }
                }
                _ => {}
            }
        }
    }
}

fn url_problems(url: &str) -> impl Iterator<Item = &'static str> {
    let after = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = after.split(['/', '?', '#']).next().unwrap_or("");
    let problems = [
        (!url.starts_with("https://"), "URL scheme must be https"),
        (authority.contains('@'), "URL must not contain a username or password"),
        (url.split('#').next().is_some_and(|url| url.contains('?')), "URL must not contain a query"),
        (url.contains('#'), "URL must not contain a fragment"),
    ];
    problems.into_iter().filter(|(wrong, _)| *wrong).map(|(_, why)| why)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n";

    fn problems(text: &str) -> String {
        let ours = ["https://ours".to_owned()];
        match Configuration::parse(&format!("{HEAD}{text}")) {
            Ok(configuration) => configuration.check(&ours).err().map_or(String::new(), |e| e.to_string()),
            Err(why) => why,
        }
    }

    #[track_caller]
    fn check(text: &str, expected: expect_test::Expect) {
        expected.assert_eq(&problems(text));
    }

    #[test]
    fn configurations_are_checked() {
        let good = "jwt:\n- issuer: {url: 'https://i', audiences: [a]}\n  claimMappings: {username: {claim: sub, prefix: ''}}\n";
        check(good, expect_test::expect![""]);
        check("anonymous: {enabled: true, conditions: [{path: /livez}]}\n", expect_test::expect![""]);
        check(
            "anonymous: {enabled: false, conditions: [{path: /livez}]}\n",
            expect_test::expect![
                "invalid authentication configuration: anonymous.conditions: enabled should be set to true when conditions are defined"
            ],
        );
        check(
            "jwt:\n- issuer: {url: 'http://u:p@i?q#f', discoveryURL: 'https://i', audiences: [a, a]}\n  claimMappings: {username: {claim: sub}}\n",
            expect_test::expect![[
                r##"invalid authentication configuration: [jwt[0].issuer.url: Invalid value: "http://u:p@i?q#f": URL scheme must be https, jwt[0].issuer.url: Invalid value: "http://u:p@i?q#f": URL must not contain a username or password, jwt[0].issuer.url: Invalid value: "http://u:p@i?q#f": URL must not contain a query, jwt[0].issuer.url: Invalid value: "http://u:p@i?q#f": URL must not contain a fragment, jwt[0].issuer.audiences[1]: Duplicate value: "a", jwt[0].issuer.audienceMatchPolicy: Invalid value: "": audienceMatchPolicy must be MatchAny for multiple audiences, jwt[0].claimMappings.username.prefix: Required value: prefix is required when claim is set. It can be set to an empty string to disable prefixing]"##
            ]],
        );
        check(
            "jwt:\n- issuer: {url: 'https://ours', audiences: []}\n  claimMappings: {username: {expression: claims.email}, uid: {expression: 'claims.'}, extra: [{key: k, valueExpression: '1'}]}\n",
            expect_test::expect![[r#"
                invalid authentication configuration: [jwt[0].issuer.url: Invalid value: "https://ours": URL must not overlap with disallowed issuers: [https://ours], jwt[0].issuer.audiences: Required value: at least one jwt[0].issuer.audiences is required, jwt[0].claimMappings.uid.expression: Invalid value: "claims.": compilation failed: ERROR: <input>:1:8: Syntax error: no viable alternative at input '.'
                 | claims.
                 | .......^, jwt[0].claimMappings.extra[0].valueExpression: Invalid value: "1": must evaluate to one of [string list(string)], jwt[0].claimMappings.username.expression: Invalid value: "claims.email": claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression]"#]],
        );
        assert!(problems("jwts: []\n").contains("unknown field"), "{}", problems("jwts: []\n"));
        assert!(Configuration::parse("kind: Other\n").unwrap_err().starts_with("expected Authentication"));
    }
}
