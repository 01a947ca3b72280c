//! `skiff token`: manages join tokens in addition to the one in the server's file `token`. Each is a
//! bootstrap token Secret in the cluster, with its own expiration, and can be deleted without affecting
//! the others.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use base64::Engine as _;
use client::remote::Remote;
use client::{Client, Kubeconfig};
use jiff::{SignedDuration, Timestamp};
use pki::join::{BootstrapToken, Fingerprint, JoinToken};
use serde_json::Value;

use crate::flags::{TokenAction, TokenFlags};
use crate::join_server::{self, SECRETS_PATH, TOKEN_PREFIX, TOKEN_TYPE};

pub fn run(flags: &TokenFlags) -> anyhow::Result<()> {
    let path = flags.kubeconfig.clone().unwrap_or_else(|| flags.data_dir.join("admin.kubeconfig"));
    let config = Kubeconfig::read(&path)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let remote = Remote::new(&config).with_context(|| format!("cannot use {}", path.display()))?;
        let client = Client::new(Arc::new(remote), "skiff-token");
        match &flags.action {
            TokenAction::Create { ttl, description, print_join_command } => {
                let token = create(&client, &config, *ttl, description).await?;
                match print_join_command {
                    true => {
                        println!(
                            "skiff agent --server {} --token {token}",
                            server_url(&client, &config).await?
                        )
                    }
                    false => println!("{token}"),
                }
            }
            TokenAction::List => {
                let path = format!("{SECRETS_PATH}?fieldSelector=type%3D{}", TOKEN_TYPE.replace('/', "%2F"));
                let list = client.request(http::Method::GET, &path, None).await?;
                print!("{}", table(&list["items"], Timestamp::now()));
            }
            TokenAction::Delete { tokens } => {
                for token in tokens {
                    let id = token_id(token)?;
                    let path = format!("{SECRETS_PATH}/{TOKEN_PREFIX}{id}");
                    let deleted = client.request(http::Method::DELETE, &path, None).await;
                    deleted.with_context(|| format!("cannot delete the token {id}"))?;
                    println!("deleted the token {id}");
                }
            }
        }
        Ok(())
    })
}

/// Creates a token and returns its complete form, which a node needs to join.
async fn create(
    client: &Client,
    config: &Kubeconfig,
    ttl: SignedDuration,
    description: &str,
) -> anyhow::Result<String> {
    let authority = std::str::from_utf8(&config.ca_pem).context("the CA of the kubeconfig is not PEM")?;
    let expires = match ttl.is_zero() {
        true => None,
        false => Some(Timestamp::now().checked_add(ttl).context("--ttl is too long")?),
    };
    let token = JoinToken {
        authority: Some(Fingerprint::from_pem(authority)?),
        bootstrap: BootstrapToken::random()?,
    };
    let secret = join_server::token_secret(&token.bootstrap, description, expires);
    client
        .request(http::Method::POST, SECRETS_PATH, Some(&secret))
        .await
        .context("cannot create the token")?;
    Ok(token.to_secret_string())
}

/// The URL at which other hosts reach the API server. The kubeconfig may contain a loopback address, so
/// the endpoint of the `kubernetes` Service comes first; without it, the URL of the kubeconfig is used.
async fn server_url(client: &Client, config: &Kubeconfig) -> anyhow::Result<String> {
    let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";
    let slice = match client.request(http::Method::GET, path, None).await {
        Err(error) if error.is_not_found() => return Ok(config.server.clone()),
        found => found?,
    };
    let address = slice.pointer("/endpoints/0/addresses/0").and_then(Value::as_str);
    let address = address.and_then(|text| text.parse::<IpAddr>().ok());
    let port = slice.pointer("/ports/0/port").and_then(Value::as_u64);
    let port = port.and_then(|port| u16::try_from(port).ok());
    let known =
        address.zip(port).map(|(address, port)| format!("https://{}", SocketAddr::new(address, port)));
    Ok(known.unwrap_or_else(|| config.server.clone()))
}

/// The token ID: the part before the dot. The secret part may be missing.
fn token_id(token: &str) -> anyhow::Result<&str> {
    let bare = token.rsplit_once("::").map_or(token, |(_, bare)| bare);
    let id = bare.split_once('.').map_or(bare, |(id, _)| id);
    match id.len() == 6 && id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()) {
        true => Ok(id),
        // The text is not quoted: it may be a secret.
        false => bail!("a token ID has six lower-case letters or digits"),
    }
}

/// Formats tokens as a table: ID, time left, expiration, usages and description.
fn table(secrets: &Value, now: Timestamp) -> String {
    let base64 = base64::engine::general_purpose::STANDARD;
    let field = |secret: &Value, name: &str| {
        let bytes = base64.decode(secret["data"][name].as_str().unwrap_or_default()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut text = format!("{:<8}{:<12}{:<22}{:<26}{}\n", "ID", "TTL", "EXPIRES", "USAGES", "DESCRIPTION");
    for secret in secrets.as_array().into_iter().flatten() {
        let expires = field(secret, "expiration");
        let remaining = match (expires.as_str(), expires.parse::<Timestamp>()) {
            ("", _) => "<forever>".to_owned(),
            (_, Ok(end)) if end > now => human_duration(now.duration_until(end)),
            _ => "<expired>".to_owned(),
        };
        let usages: Vec<&str> = ["authentication", "signing"]
            .into_iter()
            .filter(|usage| field(secret, &format!("usage-bootstrap-{usage}")) == "true")
            .collect();
        let or_none = |text: String, none: &str| if text.is_empty() { none.to_owned() } else { text };
        let line = format!(
            "{:<8}{remaining:<12}{:<22}{:<26}{}",
            field(secret, "token-id"),
            or_none(expires, "<never>"),
            or_none(usages.join(","), "<none>"),
            field(secret, "description"),
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// A duration in its largest unit, as in the AGE column of kubectl.
fn human_duration(time: SignedDuration) -> String {
    let seconds = time.as_secs();
    match (seconds / 86_400, seconds / 3600, seconds / 60) {
        (days, _, _) if days >= 2 => format!("{days}d"),
        (_, hours, _) if hours >= 1 => format!("{hours}h"),
        (_, _, minutes) if minutes >= 1 => format!("{minutes}m"),
        _ => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_are_listed_without_their_secrets() {
        let now: Timestamp = "2026-11-15T12:00:00Z".parse().unwrap();
        let token = |id: &str, seconds: Option<i64>, text: &str| {
            let token = BootstrapToken { id: id.to_owned(), secret: "0123456789abcdef".to_owned() };
            join_server::token_secret(
                &token,
                text,
                seconds.map(|seconds| now + SignedDuration::from_secs(seconds)),
            )
        };
        let other = json!({"data": {"token-id": base64::engine::general_purpose::STANDARD.encode("ffffff")}});
        let all = json!([
            token("aaaaaa", None, "for all"),
            token("bbbbbb", Some(86_399), ""),
            token("cccccc", Some(10 * 86_400), "x"),
            token("dddddd", Some(59), ""),
            token("eeeeee", Some(-1), ""),
            other,
        ]);
        let rendered = table(&all, now);
        assert!(!rendered.contains("0123456789abcdef"));
        expect![[r#"
            ID      TTL         EXPIRES               USAGES                    DESCRIPTION
            aaaaaa  <forever>   <never>               authentication            for all
            bbbbbb  23h         2026-11-16T11:59:59Z  authentication
            cccccc  10d         2026-11-25T12:00:00Z  authentication            x
            dddddd  59s         2026-11-15T12:00:59Z  authentication
            eeeeee  <expired>   2026-11-15T11:59:59Z  authentication
            ffffff  <forever>   <never>               <none>
        "#]]
        .assert_eq(&rendered);
    }

    #[test]
    fn token_id_accepts_all_token_formats() {
        for text in ["abc123", "abc123.0123456789abcdef", "K10ff::abc123.0123456789abcdef"] {
            assert_eq!(token_id(text).unwrap(), "abc123");
        }
        for text in ["", "secret-secret", "ABC123", "K10ff::", "../x/y"] {
            let error = token_id(text).unwrap_err().to_string();
            assert!(text.is_empty() || !error.contains(text), "{error}");
        }
    }
}
