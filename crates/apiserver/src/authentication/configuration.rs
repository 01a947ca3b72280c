//! AuthenticationConfiguration: JWT issuers, and anonymous access.
//!
//! Decoding is strict: a misspelled field could grant or deny access by accident. Expressions that
//! do not compile are errors, too.

use std::collections::BTreeSet;
use std::path::Path;

use api::field::quote;
use serde::Deserialize;

use super::Error;
use super::oidc::expressions::ClaimExpressions;
use super::options::AnonymousAccess;

const VERSIONS: [&str; 3] =
    ["apiserver.config.k8s.io/v1", "apiserver.config.k8s.io/v1beta1", "apiserver.config.k8s.io/v1alpha1"];
const MAX_ISSUERS: usize = 64;

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

/// A JWT issuer with its claim mappings and validation rules.
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
    /// PEM; empty uses the system's trust store.
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
    pub fn to_anonymous_access(&self) -> AnonymousAccess {
        let paths = || self.conditions.iter().map(|condition| condition.path.clone()).collect();
        match (self.enabled, self.conditions.is_empty()) {
            (false, _) => AnonymousAccess::Disabled,
            (true, true) => AnonymousAccess::AllPaths,
            (true, false) => AnonymousAccess::Paths(paths()),
        }
    }
}

impl Configuration {
    pub fn read(path: &Path) -> Result<Configuration, Error> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let bad = |reason: String| Error::Configuration { path: path.to_owned(), reason };
        Configuration::parse(&text).map_err(bad)
    }

    pub fn parse(text: &str) -> Result<Configuration, String> {
        let configuration: Configuration = schema::yaml::from_str(text).map_err(|error| error.to_string())?;
        if configuration.kind != "AuthenticationConfiguration"
            || !VERSIONS.contains(&configuration.api_version.as_str())
        {
            return Err(format!(
                "expected AuthenticationConfiguration of {}, got {} of {}",
                VERSIONS[0],
                quote(&configuration.kind),
                quote(&configuration.api_version)
            ));
        }
        Ok(configuration)
    }

    /// Validates with upstream's messages. `service_account_issuers` must not be used as issuer
    /// URLs.
    pub fn check(&self, service_account_issuers: &[String]) -> Result<(), Error> {
        let mut errors = Vec::new();
        if self.jwt.len() > MAX_ISSUERS {
            errors.push(format!("jwt: Too many: {}: must have at most 64 items", self.jwt.len()));
        }
        let mut seen = BTreeSet::new();
        for (i, jwt) in self.jwt.iter().enumerate() {
            jwt.check(&format!("jwt[{i}]"), service_account_issuers, &mut errors);
            for (field, url) in
                [("url", Some(&jwt.issuer.url)), ("discoveryURL", jwt.issuer.discovery_url.as_ref())]
            {
                let Some(url) = url.filter(|url| !url.is_empty()) else { continue };
                if !seen.insert((field, url)) {
                    errors.push(format!("jwt[{i}].issuer.{field}: Duplicate value: {}", quote(url)));
                }
            }
        }
        if let Some(rule) = &self.anonymous
            && !rule.enabled
            && !rule.conditions.is_empty()
        {
            errors.push(
                "anonymous.conditions: enabled should be set to true when conditions are defined".to_owned(),
            );
        }
        if errors.is_empty() { Ok(()) } else { Err(Error::Invalid(crate::rbac::aggregate_errors(&errors))) }
    }
}

impl Jwt {
    fn check(&self, at: &str, service_account_issuers: &[String], errors: &mut Vec<String>) {
        let issuer = &self.issuer;
        let invalid = |field: &str, value: &str, reason: &str| {
            format!("{at}.{field}: Invalid value: {}: {reason}", quote(value))
        };
        if issuer.url.is_empty() {
            errors.push(format!("{at}.issuer.url: Required value"));
        } else {
            if service_account_issuers.contains(&issuer.url) {
                let reason = format!(
                    "URL must not overlap with disallowed issuers: [{}]",
                    service_account_issuers.join(" ")
                );
                errors.push(invalid("issuer.url", &issuer.url, &reason));
            }
            errors.extend(url_errors(&issuer.url).map(|reason| invalid("issuer.url", &issuer.url, reason)));
        }
        if let Some(url) = issuer.discovery_url.as_ref().filter(|url| !url.is_empty()) {
            if url.trim_end_matches('/') == issuer.url.trim_end_matches('/') {
                errors.push(invalid("issuer.discoveryURL", url, "discoveryURL must be different from URL"));
            }
            errors.extend(url_errors(url).map(|reason| invalid("issuer.discoveryURL", url, reason)));
        }
        if issuer.audiences.is_empty() {
            errors.push(format!(
                "{at}.issuer.audiences: Required value: at least one {at}.issuer.audiences is required"
            ));
        }
        let mut seen = BTreeSet::new();
        for (i, audience) in issuer.audiences.iter().enumerate() {
            if audience.is_empty() {
                errors.push(format!("{at}.issuer.audiences[{i}]: Required value"));
            } else if !seen.insert(audience) {
                errors.push(format!("{at}.issuer.audiences[{i}]: Duplicate value: {}", quote(audience)));
            }
        }
        let policy = issuer.audience_match_policy.as_str();
        let field = "issuer.audienceMatchPolicy";
        if issuer.audiences.len() > 1 && policy != "MatchAny" {
            let reason = "audienceMatchPolicy must be MatchAny for multiple audiences";
            errors.push(invalid(field, policy, reason));
        }
        if issuer.audiences.len() == 1 && !matches!(policy, "" | "MatchAny") {
            let reason = "audienceMatchPolicy must be empty or MatchAny for single audience";
            errors.push(invalid(field, policy, reason));
        }
        if !issuer.egress_selector_type.is_empty() {
            let reason = "egress selectors are not supported";
            errors.push(invalid("issuer.egressSelectorType", &issuer.egress_selector_type, reason));
        }
        self.check_claims(at, errors);
    }

    fn check_claims(&self, at: &str, errors: &mut Vec<String>) {
        let mappings = &self.claim_mappings;
        ClaimExpressions::new(self, at, errors);
        for (name, mapping) in [("username", &mappings.username), ("groups", &mappings.groups)] {
            let field = format!("{at}.claimMappings.{name}");
            match (mapping.claim.is_empty(), mapping.expression.is_empty(), &mapping.prefix) {
                (false, false, _) => errors
                    .push(format!("{field}: Invalid value: \"\": claim and expression can't both be set")),
                (true, false, Some(prefix)) => errors.push(format!(
                    "{field}.prefix: Invalid value: {}: prefix can't be set when expression is set",
                    quote(prefix)
                )),
                (true, true, _) if name == "username" => {
                    errors.push(format!("{field}: Required value: claim or expression is required"));
                }
                (true, true, Some(prefix)) if !prefix.is_empty() => {
                    errors.push(format!("{field}.claim: Required value: non-empty claim name is required"));
                }
                (false, _, None) => {
                    let reason = "prefix is required when claim is set. It can be set to an empty string to disable prefixing";
                    errors.push(format!("{field}.prefix: Required value: {reason}"));
                }
                _ => {}
            }
        }
        let mut seen = BTreeSet::new();
        for (i, rule) in self.claim_validation_rules.iter().enumerate() {
            let field = format!("{at}.claimValidationRules[{i}]");
            match (rule.claim.as_str(), rule.expression.as_str()) {
                ("", "") => errors.push(format!("{field}: Required value: claim or expression is required")),
                (claim, "") => {
                    if !rule.message.is_empty() {
                        let reason = "may not be specified when claim is set";
                        errors.push(format!(
                            "{field}.message: Invalid value: {}: {reason}",
                            quote(&rule.message)
                        ));
                    }
                    if !seen.insert(claim) {
                        errors.push(format!("{field}.claim: Duplicate value: {}", quote(claim)));
                    }
                }
                _ => {}
            }
        }
    }
}

fn url_errors(url: &str) -> impl Iterator<Item = &'static str> {
    let after = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = after.split(['/', '?', '#']).next().unwrap_or("");
    let errors = [
        (!url.starts_with("https://"), "URL scheme must be https"),
        (authority.contains('@'), "URL must not contain a username or password"),
        (url.split('#').next().is_some_and(|url| url.contains('?')), "URL must not contain a query"),
        (url.contains('#'), "URL must not contain a fragment"),
    ];
    errors.into_iter().filter(|(wrong, _)| *wrong).map(|(_, reason)| reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG_HEADER: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n";

    fn validation_error(text: &str) -> String {
        let service_account_issuers = ["https://ours".to_owned()];
        match Configuration::parse(&format!("{CONFIG_HEADER}{text}")) {
            Ok(configuration) => {
                configuration.check(&service_account_issuers).err().map_or(String::new(), |e| e.to_string())
            }
            Err(reason) => reason,
        }
    }

    #[track_caller]
    fn check(text: &str, expected: expect_test::Expect) {
        expected.assert_eq(&validation_error(text));
    }

    #[test]
    fn validates_configuration() {
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
        assert!(
            validation_error("jwts: []\n").contains("unknown field"),
            "{}",
            validation_error("jwts: []\n")
        );
        assert!(Configuration::parse("kind: Other\n").unwrap_err().starts_with("expected Authentication"));
    }
}
