//! `--authentication-token-webhook-config-file`: another server that knows tokens, asked by TokenReviews.

use std::path::PathBuf;
use std::time::Duration;

use api::json::Json as _;
use serde_json::{Value, json};

use super::{Answers, Error, Owner};
use crate::access::User;
use crate::https::Client;

#[derive(Clone, Debug)]
pub struct Options {
    pub kubeconfig: PathBuf,
    /// `v1` or `v1beta1`.
    pub version: String,
    /// How long answers are kept.
    pub cache: Duration,
}

pub struct Webhook {
    client: Client,
    version: String,
    time: Duration,
    answers: Answers<Option<(User, Vec<String>)>>,
}

impl Webhook {
    pub fn new(options: &Options) -> Result<Webhook, Error> {
        if !matches!(options.version.as_str(), "v1" | "v1beta1") {
            let why = format!(
                "unsupported authentication webhook version {:?}, supported versions are \"v1\", \"v1beta1\"",
                options.version
            );
            return Err(Error::Flag { flag: "authentication-token-webhook-version", why });
        }
        Ok(Webhook {
            client: Client::from_kubeconfig(&options.kubeconfig)?,
            version: options.version.clone(),
            time: options.cache,
            answers: Answers::default(),
        })
    }

    /// Whose the token is and for which of the wanted audiences; `ours` are meant where the webhook says none.
    pub async fn owner(
        &self,
        token: &str,
        wanted: &[String],
        ours: &[String],
    ) -> Result<Option<Owner>, String> {
        let mut question = vec![token.as_bytes()];
        question.extend(wanted.iter().map(String::as_bytes));
        let key = self.answers.key(&question);
        let answer = match self.answers.get(&key) {
            Some(answer) => answer,
            None => {
                let answer = self.ask(token, wanted, ours).await?;
                self.answers.keep(key, answer.clone(), self.time);
                answer
            }
        };
        Ok(answer.map(|(user, audiences)| Owner { user, audiences }))
    }

    async fn ask(
        &self,
        token: &str,
        wanted: &[String],
        ours: &[String],
    ) -> Result<Option<(User, Vec<String>)>, String> {
        let review = json!({
            "apiVersion": format!("authentication.k8s.io/{}", self.version), "kind": "TokenReview",
            "metadata": {"creationTimestamp": null},
            "spec": {"token": token, "audiences": wanted},
            "status": {"user": {}},
        });
        let answer = self.client.review(&review).await.map_err(|error| {
            tracing::warn!(%error, "the webhook that knows tokens failed");
            error.to_string()
        })?;
        let status = answer.at("status");
        let told = texts(status, "audiences");
        let told = if told.is_empty() { ours.to_vec() } else { told };
        let audiences: Vec<String> = wanted.iter().filter(|one| told.contains(one)).cloned().collect();
        if audiences.is_empty() {
            return Ok(None);
        }
        if !status.flag("authenticated") {
            let why = status.text("error");
            return if why.is_empty() { Ok(None) } else { Err(why.to_owned()) };
        }
        Ok(Some((user(status.at("user")), audiences)))
    }
}

/// A user as reviews tell of them.
fn user(info: &Value) -> User {
    let extra = info.entries("extra").map(|(key, values)| {
        let values = values.as_array().into_iter().flatten();
        (key.to_owned(), values.filter_map(Value::as_str).map(str::to_owned).collect())
    });
    User {
        name: info.text("username").to_owned(),
        uid: info.text("uid").to_owned(),
        groups: texts(info, "groups"),
        extra: extra.collect(),
    }
}

fn texts(value: &Value, name: &str) -> Vec<String> {
    value.items(name).iter().filter_map(Value::as_str).map(str::to_owned).collect()
}
