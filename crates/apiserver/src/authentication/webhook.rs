//! `--authentication-token-webhook-config-file`: authentication by TokenReview webhook.

use std::path::PathBuf;
use std::time::Duration;

use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{Error, ReviewCache, TokenOwner};
use crate::access::User;
use crate::https::HttpsClient;

#[derive(Clone, Debug)]
pub struct Options {
    pub kubeconfig: PathBuf,
    /// `v1` or `v1beta1`.
    pub version: String,
    /// How long results are cached.
    pub cache_ttl: Duration,
}

pub struct Webhook {
    client: HttpsClient,
    version: String,
    cache_ttl: Duration,
    cache: ReviewCache<Option<(User, Vec<String>)>>,
}

impl Webhook {
    pub fn new(options: &Options) -> Result<Webhook, Error> {
        if !matches!(options.version.as_str(), "v1" | "v1beta1") {
            let reason = format!(
                "unsupported authentication webhook version {:?}, supported versions are \"v1\", \"v1beta1\"",
                options.version
            );
            return Err(Error::Flag { flag: "authentication-token-webhook-version", reason });
        }
        Ok(Webhook {
            client: HttpsClient::from_kubeconfig(&options.kubeconfig)?,
            version: options.version.clone(),
            cache_ttl: options.cache_ttl,
            cache: ReviewCache::default(),
        })
    }

    /// Authenticates a token for the requested audiences. A webhook that returns no audiences is
    /// not audience-aware: `server_audiences` apply.
    pub async fn authenticate_token(
        &self,
        token: &str,
        requested_audiences: &[String],
        server_audiences: &[String],
    ) -> Result<Option<TokenOwner>, String> {
        let mut question = vec![token.as_bytes()];
        question.extend(requested_audiences.iter().map(String::as_bytes));
        let key = self.cache.key(&question);
        let answer = match self.cache.get(&key) {
            Some(answer) => answer,
            None => {
                let answer = self.create_token_review(token, requested_audiences, server_audiences).await?;
                self.cache.insert(key, answer.clone(), self.cache_ttl);
                answer
            }
        };
        Ok(answer.map(|(user, audiences)| TokenOwner { user, audiences }))
    }

    async fn create_token_review(
        &self,
        token: &str,
        requested_audiences: &[String],
        server_audiences: &[String],
    ) -> Result<Option<(User, Vec<String>)>, String> {
        let review = json!({
            "apiVersion": format!("authentication.k8s.io/{}", self.version), "kind": "TokenReview",
            "metadata": {"creationTimestamp": null},
            "spec": {"token": token, "audiences": requested_audiences},
            "status": {"user": {}},
        });
        let answer = self.client.post_with_retry(&review).await.map_err(|error| {
            tracing::warn!(%error, "TokenReview webhook failed");
            error.to_string()
        })?;
        let status = answer.at("status");
        let status_audiences = string_list(status, "audiences");
        let status_audiences =
            if status_audiences.is_empty() { server_audiences.to_vec() } else { status_audiences };
        let audiences: Vec<String> =
            requested_audiences.iter().filter(|one| status_audiences.contains(one)).cloned().collect();
        if audiences.is_empty() {
            return Ok(None);
        }
        if !status.flag("authenticated") {
            let reason = status.text("error");
            return if reason.is_empty() { Ok(None) } else { Err(reason.to_owned()) };
        }
        Ok(Some((user(status.at("user")), audiences)))
    }
}

/// The user in the status of a TokenReview.
fn user(info: &Value) -> User {
    let extra = info.entries("extra").map(|(key, values)| {
        let values = values.as_array().into_iter().flatten();
        (key.to_owned(), values.filter_map(Value::as_str).map(str::to_owned).collect())
    });
    User {
        name: info.text("username").to_owned(),
        uid: info.text("uid").to_owned(),
        groups: string_list(info, "groups"),
        extra: extra.collect(),
    }
}

fn string_list(value: &Value, name: &str) -> Vec<String> {
    value.items(name).iter().filter_map(Value::as_str).map(str::to_owned).collect()
}
