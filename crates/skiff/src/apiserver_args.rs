//! `--kube-apiserver-arg name=value`: the flags of upstream's kube-apiserver that skiff supports.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::certificates::{Certificates, PROXY_CLIENT};
use crate::flags::ServerFlags;

/// All supported flag names, sorted.
const SUPPORTED_FLAGS: &[&str] = &[
    "admission-control-config-file",
    "anonymous-auth",
    "api-audiences",
    "audit-log-format",
    "audit-log-maxage",
    "audit-log-maxbackup",
    "audit-log-maxsize",
    "audit-log-mode",
    "audit-log-path",
    "audit-policy-file",
    "audit-webhook-batch-buffer-size",
    "audit-webhook-batch-max-size",
    "audit-webhook-batch-max-wait",
    "audit-webhook-batch-throttle-burst",
    "audit-webhook-batch-throttle-enable",
    "audit-webhook-batch-throttle-qps",
    "audit-webhook-config-file",
    "audit-webhook-initial-backoff",
    "audit-webhook-mode",
    "authentication-config",
    "authentication-token-webhook-cache-ttl",
    "authentication-token-webhook-config-file",
    "authentication-token-webhook-version",
    "authorization-config",
    "authorization-mode",
    "authorization-webhook-cache-authorized-ttl",
    "authorization-webhook-cache-unauthorized-ttl",
    "authorization-webhook-config-file",
    "authorization-webhook-version",
    "client-ca-file",
    "default-not-ready-toleration-seconds",
    "default-unreachable-toleration-seconds",
    "disable-admission-plugins",
    "enable-admission-plugins",
    "enable-bootstrap-token-auth",
    "encryption-provider-config",
    "encryption-provider-config-automatic-reload",
    "event-ttl",
    "max-mutating-requests-inflight",
    "max-requests-inflight",
    "oidc-ca-file",
    "oidc-client-id",
    "oidc-groups-claim",
    "oidc-groups-prefix",
    "oidc-issuer-url",
    "oidc-required-claim",
    "oidc-signing-algs",
    "oidc-username-claim",
    "oidc-username-prefix",
    "proxy-client-cert-file",
    "proxy-client-key-file",
    "requestheader-allowed-names",
    "requestheader-client-ca-file",
    "requestheader-extra-headers-prefix",
    "requestheader-group-headers",
    "requestheader-uid-headers",
    "requestheader-username-headers",
    "runtime-config",
    "service-account-extend-token-expiration",
    "service-account-issuer",
    "service-account-jwks-uri",
    "service-account-max-token-expiration",
    "token-auth-file",
];

/// The values of each flag, in the order given.
#[derive(Debug, Default)]
pub struct ApiserverArgs(BTreeMap<&'static str, Vec<String>>);

impl ApiserverArgs {
    pub fn parse(args: &[String]) -> anyhow::Result<ApiserverArgs> {
        let mut arguments = ApiserverArgs::default();
        for argument in args {
            // As in upstream, a flag without a value is a boolean that is set to true.
            let text = argument.trim_start_matches("--");
            let (name, value) = text.split_once('=').unwrap_or((text, "true"));
            let Some(known) = SUPPORTED_FLAGS.iter().find(|known| **known == name) else {
                bail!(
                    "--kube-apiserver-arg {name:?} is not supported; supported names: {}",
                    SUPPORTED_FLAGS.join(", ")
                );
            };
            arguments.0.entry(known).or_default().push(value.to_owned());
        }
        Ok(arguments)
    }

    /// All values of a flag.
    pub fn values(&self, name: &str) -> &[String] {
        debug_assert!(SUPPORTED_FLAGS.contains(&name), "{name}");
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// The last value, unless it is empty.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values(name).last().map(String::as_str).filter(|value| !value.is_empty())
    }

    /// All values of a flag; each may be a comma-separated list.
    pub fn list(&self, name: &str) -> Vec<String> {
        let values = self.values(name).iter().flat_map(|value| value.split(','));
        values.filter(|value| !value.is_empty()).map(str::to_owned).collect()
    }

    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.value(name).map(PathBuf::from)
    }

    pub fn flag(&self, name: &str) -> anyhow::Result<Option<bool>> {
        match self.value(name) {
            None => Ok(None),
            Some("true" | "True" | "TRUE" | "t" | "T" | "1") => Ok(Some(true)),
            Some("false" | "False" | "FALSE" | "f" | "F" | "0") => Ok(Some(false)),
            Some(other) => bail!("--kube-apiserver-arg {name}: {other:?} is neither true nor false"),
        }
    }

    pub fn duration(&self, name: &str) -> anyhow::Result<Option<Duration>> {
        let Some(text) = self.value(name) else { return Ok(None) };
        let parsed = api::time::parse_duration(text).ok().and_then(|time| Duration::try_from(time).ok());
        parsed
            .map(Some)
            .with_context(|| format!("--kube-apiserver-arg {name}: {text:?} is not a duration such as 1m30s"))
    }

    pub fn admission(&self) -> anyhow::Result<apiserver::AdmissionOptions> {
        let settings = self.path("admission-control-config-file");
        let settings = settings.map(|path| apiserver::AdmissionSettings::load(&path)).transpose()?;
        let mut settings = settings.unwrap_or_default();
        for (seconds, node) in settings.toleration_seconds.iter_mut().zip(["not-ready", "unreachable"]) {
            *seconds = self.number(&format!("default-{node}-toleration-seconds"), *seconds)?;
        }
        Ok(apiserver::AdmissionOptions {
            enable: self.list("enable-admission-plugins"),
            disable: self.list("disable-admission-plugins"),
            settings,
        })
    }

    fn number<T: std::str::FromStr>(&self, name: &str, default_value: T) -> anyhow::Result<T> {
        let Some(text) = self.value(name) else { return Ok(default_value) };
        text.parse()
            .ok()
            .with_context(|| format!("--kube-apiserver-arg {name}: {text:?} is not a valid number"))
    }

    /// The total concurrency limit. Priority and Fairness adds the limits for reads and for writes, as
    /// upstream does.
    pub fn max_inflight_requests(&self) -> anyhow::Result<u64> {
        let reads: u32 = self.number("max-requests-inflight", 400)?;
        let writes: u32 = self.number("max-mutating-requests-inflight", 200)?;
        match u64::from(reads) + u64::from(writes) {
            0 => bail!(
                "--max-requests-inflight plus --max-mutating-requests-inflight, which add up to 0, can not be less than 1"
            ),
            total => Ok(total),
        }
    }

    /// Audit backends. Flag names and defaults are those of upstream.
    pub fn audit(&self) -> anyhow::Result<apiserver::AuditOptions> {
        let log = self.path("audit-log-path").map(|path| {
            anyhow::Ok(apiserver::AuditLogOptions {
                path,
                max_size: self.number("audit-log-maxsize", 100)?,
                max_backups: self.number("audit-log-maxbackup", 100)?,
                max_age: self.number("audit-log-maxage", 366)?,
                json: match self.value("audit-log-format") {
                    None | Some("json") => true,
                    Some("legacy") => false,
                    Some(other) => {
                        bail!("invalid audit log format {other}, allowed formats are \"legacy,json\"")
                    }
                },
                mode: self.audit_mode("log", apiserver::AuditMode::Blocking)?,
            })
        });
        let webhook = self.path("audit-webhook-config-file").map(|kubeconfig| {
            let defaults = apiserver::AuditBatch::default();
            let throttle_enabled = self.flag("audit-webhook-batch-throttle-enable")?.unwrap_or(true);
            let throttle = (
                self.number("audit-webhook-batch-throttle-qps", 10.0)?,
                self.number("audit-webhook-batch-throttle-burst", 15)?,
            );
            anyhow::Ok(apiserver::AuditWebhookOptions {
                kubeconfig,
                mode: self.audit_mode("webhook", apiserver::AuditMode::Batch)?,
                batch: apiserver::AuditBatch {
                    buffer: self.number("audit-webhook-batch-buffer-size", defaults.buffer)?,
                    max_size: self.number("audit-webhook-batch-max-size", defaults.max_size)?,
                    max_wait: self.duration("audit-webhook-batch-max-wait")?.unwrap_or(defaults.max_wait),
                    throttle: throttle_enabled.then_some(throttle),
                },
                initial_backoff: self
                    .duration("audit-webhook-initial-backoff")?
                    .unwrap_or(Duration::from_secs(10)),
            })
        });
        Ok(apiserver::AuditOptions {
            policy_file: self.path("audit-policy-file"),
            log: log.transpose()?,
            webhook: webhook.transpose()?,
        })
    }

    fn audit_mode(
        &self,
        backend: &str,
        default_value: apiserver::AuditMode,
    ) -> anyhow::Result<apiserver::AuditMode> {
        Ok(match self.value(&format!("audit-{backend}-mode")) {
            None => default_value,
            Some("batch") => apiserver::AuditMode::Batch,
            Some("blocking") => apiserver::AuditMode::Blocking,
            Some("blocking-strict") => apiserver::AuditMode::BlockingStrict,
            Some(other) => bail!(
                "invalid audit {backend} mode {other}, allowed modes are \"batch,blocking,blocking-strict\""
            ),
        })
    }

    pub fn authentication(&self, certificates: &Certificates) -> anyhow::Result<apiserver::Authentication> {
        let mut client_ca_pem = certificates.client_ca().to_owned();
        if let Some(path) = self.path("client-ca-file") {
            client_ca_pem.push_str(&read(&path)?);
        }
        let webhook = self.path("authentication-token-webhook-config-file").map(|kubeconfig| {
            anyhow::Ok(apiserver::WebhookOptions {
                kubeconfig,
                version: self.value("authentication-token-webhook-version").unwrap_or("v1beta1").to_owned(),
                cache_ttl: self
                    .duration("authentication-token-webhook-cache-ttl")?
                    .unwrap_or(Duration::from_secs(120)),
            })
        });
        Ok(apiserver::Authentication {
            client_ca_pem,
            front_proxy: Some(self.front_proxy(certificates)?),
            token_file: self.path("token-auth-file"),
            bootstrap_tokens: self.flag("enable-bootstrap-token-auth")?.unwrap_or(true),
            webhook: webhook.transpose()?,
            configuration: self.path("authentication-config"),
            oidc: self.oidc()?,
            anonymous: self.flag("anonymous-auth")?,
        })
    }

    /// Whether the encryption configuration file is reloaded when it changes.
    pub fn encryption_reload_enabled(&self) -> anyhow::Result<bool> {
        Ok(self.flag("encryption-provider-config-automatic-reload")?.unwrap_or(false))
    }

    pub fn authorization(&self) -> anyhow::Result<apiserver::Authorization> {
        let time = |name: &str, default_value: u64| {
            anyhow::Ok(self.duration(name)?.unwrap_or(Duration::from_secs(default_value)))
        };
        let webhook = self.path("authorization-webhook-config-file").map(|kubeconfig| {
            anyhow::Ok(apiserver::AuthorizationWebhookOptions {
                name: "webhook".to_owned(),
                kubeconfig,
                version: self.value("authorization-webhook-version").unwrap_or("v1beta1").to_owned(),
                authorized: time("authorization-webhook-cache-authorized-ttl", 300)?,
                unauthorized: time("authorization-webhook-cache-unauthorized-ttl", 30)?,
                timeout: Duration::from_secs(30),
                conditions: Vec::new(),
                deny_on_failure: false,
            })
        });
        Ok(apiserver::Authorization {
            configuration: self.path("authorization-config"),
            modes: self.list("authorization-mode"),
            webhook: webhook.transpose()?,
        })
    }

    fn oidc(&self) -> anyhow::Result<Option<apiserver::Oidc>> {
        if SUPPORTED_FLAGS.iter().all(|name| !name.starts_with("oidc-") || self.values(name).is_empty()) {
            return Ok(None);
        }
        let text = |name: &str| self.value(name).unwrap_or("").to_owned();
        let (issuer_url, client_id) = (text("oidc-issuer-url"), text("oidc-client-id"));
        if issuer_url.is_empty() || client_id.is_empty() {
            bail!(
                "oidc-issuer-url and oidc-client-id must be specified together when any oidc-* flags are set"
            );
        }
        let required = self.values("oidc-required-claim").iter().map(|pair| {
            let (claim, value) = pair.split_once('=').with_context(|| {
                format!("--kube-apiserver-arg oidc-required-claim: {pair:?} is not key=value")
            })?;
            Ok((claim.trim().to_owned(), value.trim().to_owned()))
        });
        Ok(Some(apiserver::Oidc {
            issuer_url,
            client_id,
            ca_pem: self.path("oidc-ca-file").map(|path| read(&path)).transpose()?.unwrap_or_default(),
            username_claim: self.value("oidc-username-claim").unwrap_or("sub").to_owned(),
            username_prefix: text("oidc-username-prefix"),
            groups_claim: text("oidc-groups-claim"),
            groups_prefix: text("oidc-groups-prefix"),
            required_claims: required.collect::<anyhow::Result<_>>()?,
            signing_algorithms: self.list("oidc-signing-algs"),
        }))
    }

    /// The defaults are skiff's own request header CA and upstream's usual header names.
    fn front_proxy(&self, certificates: &Certificates) -> anyhow::Result<apiserver::FrontProxy> {
        let list = |name: &str, default_value: &str| {
            let list_values = self.list(name);
            if self.values(name).is_empty() { vec![default_value.to_owned()] } else { list_values }
        };
        let (ca_pem, allowed_names) = match self.path("requestheader-client-ca-file") {
            Some(path) => (read(&path)?, self.list("requestheader-allowed-names")),
            None => (
                certificates.request_header_ca().to_owned(),
                list("requestheader-allowed-names", PROXY_CLIENT),
            ),
        };
        Ok(apiserver::FrontProxy {
            ca_pem,
            allowed_names,
            username_headers: list("requestheader-username-headers", "X-Remote-User"),
            uid_headers: list("requestheader-uid-headers", "X-Remote-Uid"),
            group_headers: list("requestheader-group-headers", "X-Remote-Group"),
            extra_header_prefixes: list("requestheader-extra-headers-prefix", "X-Remote-Extra-"),
        })
    }

    /// The client certificate that this server presents to aggregated API servers: one from the
    /// administrator, or skiff's own.
    pub fn proxy_client(&self, certificates: &Certificates) -> anyhow::Result<Arc<pki::ClientCertificate>> {
        match (self.path("proxy-client-cert-file"), self.path("proxy-client-key-file")) {
            (None, None) => Ok(certificates.proxy_client_tls()),
            (Some(certificate), Some(key)) => {
                let certificate_pair =
                    pki::CertKeyPair { cert_pem: read(&certificate)?, key_pem: read(&key)? };
                Ok(pki::ClientCertificate::new(&certificate_pair)?)
            }
            _ => {
                bail!(
                    "--kube-apiserver-arg proxy-client-cert-file and proxy-client-key-file must be set together"
                )
            }
        }
    }

    pub fn tokens(&self, flags: &ServerFlags) -> anyhow::Result<apiserver::ServiceAccountTokenConfig> {
        let mut issuers = self.values("service-account-issuer").to_vec();
        if issuers.is_empty() {
            issuers.push(format!("https://kubernetes.default.svc.{}", flags.cluster_domain));
        }
        if issuers.iter().any(String::is_empty) {
            bail!("--kube-apiserver-arg service-account-issuer: must not be empty");
        }
        let max_expiration = self
            .duration("service-account-max-token-expiration")?
            .filter(|max_expiration| !max_expiration.is_zero());
        if max_expiration.is_some_and(|max_expiration| {
            max_expiration < Duration::from_secs(3600) || max_expiration.as_secs() > 1 << 32
        }) {
            bail!("the service-account-max-token-expiration must be between 1 hour and 2^32 seconds");
        }
        let max_seconds =
            max_expiration.and_then(|max_expiration| i64::try_from(max_expiration.as_secs()).ok());
        Ok(apiserver::ServiceAccountTokenConfig {
            keys: pki::token::Keys::load_or_create(&flags.node.data_dir.join("tls"))?,
            issuers,
            audiences: self.list("api-audiences"),
            key_set_url: self.value("service-account-jwks-uri").map(str::to_owned),
            max_expiration_seconds: max_seconds,
            extend_expiration: self.flag("service-account-extend-token-expiration")?.unwrap_or(true),
        })
    }
}

fn read(path: &std::path::Path) -> anyhow::Result<String> {
    let mut text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> anyhow::Result<ApiserverArgs> {
        ApiserverArgs::parse(&args.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn reads_flags_like_upstream() {
        assert!(SUPPORTED_FLAGS.is_sorted());
        let arguments = parse(&[
            "anonymous-auth=false",
            "--enable-bootstrap-token-auth",
            "api-audiences=a,b",
            "api-audiences=c",
            "authentication-token-webhook-cache-ttl=1m30s",
            "service-account-issuer=https://a=b",
        ])
        .unwrap();
        assert_eq!(arguments.flag("anonymous-auth").unwrap(), Some(false));
        assert_eq!(arguments.flag("enable-bootstrap-token-auth").unwrap(), Some(true));
        assert_eq!(arguments.list("api-audiences"), ["a", "b", "c"]);
        let ttl = arguments.duration("authentication-token-webhook-cache-ttl").unwrap();
        assert_eq!(ttl, Some(Duration::from_secs(90)));
        assert_eq!(arguments.value("service-account-issuer"), Some("https://a=b"));
        assert_eq!(arguments.value("token-auth-file"), None);
        assert_eq!(arguments.admission().unwrap().settings.toleration_seconds, [300, 300]);
        let overridden = parse(&["default-unreachable-toleration-seconds=30"]).unwrap().admission().unwrap();
        assert_eq!(overridden.settings.toleration_seconds, [300, 30]);
        assert_eq!(arguments.max_inflight_requests().unwrap(), apiserver::DEFAULT_MAX_REQUESTS_INFLIGHT);
        assert_eq!(parse(&["max-requests-inflight=1000"]).unwrap().max_inflight_requests().unwrap(), 1200);
        assert!(
            parse(&["max-requests-inflight=0", "max-mutating-requests-inflight=0"])
                .unwrap()
                .max_inflight_requests()
                .is_err()
        );
        assert!(arguments.audit().unwrap().log.is_none());
        let log =
            ["audit-log-path=/x", "audit-log-maxsize=7", "audit-log-mode=batch", "audit-log-format=legacy"];
        let log = parse(&log).unwrap().audit().unwrap().log.unwrap();
        assert_eq!((log.max_size, log.max_backups, log.max_age, log.json), (7, 100, 366, false));
        assert_eq!(log.mode, apiserver::AuditMode::Batch);
        assert!(parse(&["audit-log-path=/x", "audit-log-maxage=-1"]).unwrap().audit().is_err());
        let error = parse(&["token-auth-fil=/etc/x"]).unwrap_err().to_string();
        assert!(error.starts_with("--kube-apiserver-arg \"token-auth-fil\" is not supported"), "{error}");
        assert!(parse(&["anonymous-auth=perhaps"]).unwrap().flag("anonymous-auth").is_err());
    }
}
